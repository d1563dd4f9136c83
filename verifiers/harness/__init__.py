"""The part of the test runner that lives inside a sandbox.

These files are copied into the sandbox and run by the image's own Python, which has pytest but nothing of
this project: they import the standard library, pytest and each other, and nothing else.
`server` forks a `jail` for every request; in the jail, `plugin` reports over `wire` what pytest did, and
`folding` (back outside of the jail) turns those reports into one status for every test.
"""
