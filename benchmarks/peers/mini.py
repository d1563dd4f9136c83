"""mini-swe-agent: python mini.py OURS OUT. Its inspector pages ours; its agent (fixed model) writes OUT."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.test_models import DeterministicModel, make_output
from minisweagent.run.utilities.inspector import _messages_to_steps

ours, out = map(Path, sys.argv[1:])
pages = {}
for file in sorted(ours.rglob("*.traj.json")):
    document = json.loads(file.read_text())
    pages[file.stem] = [len(document["messages"]), len(_messages_to_steps(document["messages"]))]
patch = "diff --git a/x b/x\\nnew file mode 100644\\n"
submit = f"printf 'COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\\n{patch}'"
outputs = [make_output("Look.", [{"command": "echo here"}]), make_output("Done.", [{"command": submit}])]
agent = DefaultAgent(
    DeterministicModel(outputs=outputs),
    LocalEnvironment(cwd=str(out.parent)),
    system_template="You mend.",
    instance_template="Mend {{task}}.",
    output_path=out,
)
said = agent.run("it")
print(json.dumps({"version": version("mini-swe-agent"), "pages": pages, "said": said}))
