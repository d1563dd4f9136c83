"""What the light half of the room may import."""

import subprocess
import sys

HOOK = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "tokenizers", "transformers"):
            raise ImportError(f"{name} is not for this room")
sys.meta_path.insert(0, Refuse())
import rollout.agents.bash, rollout.agents.choice_prompt, rollout.agents.repair_choice
import rollout.baselines, rollout.config, rollout.engine, rollout.evaluate, rollout.journal
import rollout.samples, rollout.service, rollout.slots, rollout.statistics, rollout.visible
"""


def test_agents_service_journal_and_engine_seam_import_without_torch():
    done = subprocess.run([sys.executable, "-c", HOOK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refused = subprocess.run(
        [sys.executable, "-c", HOOK + "import rollout.native"], capture_output=True, text=True
    )
    assert "torch is not for this room" in refused.stderr
