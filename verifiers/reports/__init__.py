"""What test runners report, read into one shape: an id, a status, a message and a duration for every test.

Every module has `parse(*documents) -> Report`: pure, bytes in, decoded once. An id is `place::name > name`:

| module | written by | place | names |
|---|---|---|---|
| `marked` | our reporters: JavaScript, unittest, Django | file, or module.class | suites, then the test |
| `jest` | `jest --json`, vitest's JSON | file | describes, then the test |
| `gotest` | `go test -json` | package | the test with its subtests, as Go writes them |
| `cargo` | `cargo test`, and libtest's JSON | crate:source file, or crate:doc | the test's path |
| `junit` | JUnit XML of any tool | classname, else the suites | name |
| `ctrf` | CTRF of any tool | filePath, or "" | suites, then name |

Names stay as they are, whatever is in them; only NUL and lone surrogates, which no UTF-8 store takes, become
U+FFFD. A second test of the same id gets `#2`, in the order of the report. What could not be loaded stands
under its place alone, `place::`, with the status `error`, so that no run seems to have passed without it.
"""
