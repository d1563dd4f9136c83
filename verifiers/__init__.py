"""From a finished workspace to a verdict: test runners, grading, code-edit operators."""
