"""What runs outside the client: zygote, init and helpers. Standard library only, one thread, no asyncio.

`python -I -S -c "...; from sandbox.node.zygote import main"` starts it; it must stay small, because every
sandbox's PID 1 is a fork of it.
"""
