"""`make demo`: a real package becomes audited tasks, an agent works on them, and the agent learns."""
