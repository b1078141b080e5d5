"""The tests are a package, so `tests.support` is this folder's and never that of an installed distribution."""
