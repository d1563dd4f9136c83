// Reporter of `node --test`: one marked line for every test that ended. It runs in the parent process; the
// files under test run in its children, which see neither its standard input, where the mark comes from, nor
// its standard output, where the lines go.
import { readFileSync } from 'node:fs';
import { resolve } from 'node:path';
import { fileURLToPath } from 'node:url';

const mark = readFileSync(0, 'utf8').trim();
const line = (value) => `${mark} ${JSON.stringify(value)}\n`;
const BROKEN = new Set(['hookFailed', 'cancelledByParent', 'testAborted']);

function statusOf(failed, data) {
  if (data.todo !== undefined) return failed ? 'xfailed' : 'xpassed';
  if (data.skip !== undefined) return 'skipped';
  if (!failed) return 'passed';
  return BROKEN.has(data.details?.error?.failureType) ? 'error' : 'failed';
}

function messageOf(data) {
  const error = data.details?.error;
  const cause = error?.cause;
  return String(cause?.stack ?? cause ?? error?.message ?? data.skip ?? '').slice(-4000);
}

export default async function* report(source) {
  const path = [];
  let count = 0;
  for await (const { type, data } of source) {
    if (type === 'test:start') path[data.nesting] = data.name;
    if (type !== 'test:pass' && type !== 'test:fail') continue;
    const failed = type === 'test:fail';
    const file = data.file?.startsWith('file:') ? fileURLToPath(data.file) : (data.file ?? '');
    let names = [...path.slice(0, data.nesting), data.name];
    let status = statusOf(failed, data);
    if (data.nesting === 0 && resolve(data.name) === file) {
      if (!failed) continue; // a file without tests
      [names, status] = [[''], 'error'];
    } else if (data.details?.type === 'suite') {
      if (status !== 'skipped' && (!failed || data.details.error?.failureType === 'subtestsFailed')) continue;
      if (failed) status = 'error';
    }
    count += 1;
    const seconds = (data.details?.duration_ms ?? 0) / 1000;
    yield line({ place: file, names, status, message: messageOf(data), seconds });
  }
  yield line({ end: count });
}
