// Reporter of jest and vitest: one marked line for every test. It runs in the parent process and reads the mark
// from its standard input when it is made; tests run in children, whose noise may stand between our lines.
import { readFileSync } from 'node:fs';

const JEST = { passed: 'passed', failed: 'failed' };
const VITEST = { pass: 'passed', fail: 'failed', skip: 'skipped', todo: 'skipped' };

export default class Reporter {
  constructor() {
    this.mark = readFileSync(0, 'utf8').trim();
    this.lines = [];
  }

  add(place, names, status, message, milliseconds) {
    const value = { place, names, status, message: String(message ?? '').slice(-4000), seconds: (milliseconds ?? 0) / 1000 };
    this.lines.push(JSON.stringify(value));
  }

  end() {
    const lines = [...this.lines, JSON.stringify({ end: this.lines.length })];
    process.stdout.write('\n' + lines.map((line) => `${this.mark} ${line}\n`).join(''));
  }

  // jest
  onRunComplete(_, run) {
    const files = [...run.testResults].sort((a, b) => (a.testFilePath < b.testFilePath ? -1 : 1));
    for (const file of files) {
      for (const test of file.testResults) {
        const names = [...test.ancestorTitles, test.title];
        const status = JEST[test.status] ?? 'skipped';
        this.add(file.testFilePath, names, status, test.failureMessages?.join('\n'), test.duration);
      }
      const failed = file.testResults.some((test) => test.status === 'failed');
      if (file.testExecError && !failed) this.add(file.testFilePath, [''], 'error', file.failureMessage);
    }
    this.end();
  }

  // vitest 1 to 3
  onFinished(files) {
    this.vitest(files ?? []);
  }

  // vitest 3 and later
  onTestRunEnd(modules) {
    this.vitest(modules.map((module) => module.task));
  }

  vitest(files) {
    if (this.ended) return;
    this.ended = true;
    for (const file of [...files].sort((a, b) => (a.filepath < b.filepath ? -1 : 1))) {
      const failed = this.tasks(file.filepath, [], file.tasks);
      const message = (each) => (each.result?.errors ?? []).map((error) => error.stack ?? error.message).join('\n');
      if (file.result?.state === 'fail' && !failed) this.add(file.filepath, [''], 'error', message(file));
    }
    this.end();
  }

  tasks(place, above, tasks) {
    let failed = false;
    for (const task of tasks) {
      const names = [...above, task.name];
      if (task.type === 'suite') {
        failed = this.tasks(place, names, task.tasks) || failed;
        continue;
      }
      const status = VITEST[task.result?.state] ?? VITEST[task.mode] ?? 'error';
      failed ||= status === 'failed';
      const errors = (task.result?.errors ?? []).map((error) => error.stack ?? error.message);
      this.add(place, names, status, errors.join('\n'), task.result?.duration);
    }
    return failed;
  }
}
