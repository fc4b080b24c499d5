.PHONY: fast lint ci

fast: lint  # the inner loop
	pytest -n 2 --dist worksteal -q -p no:cacheprovider -m "not slow"

lint:
	ruff check . && ruff format --check . && mypy

ci:  # everything, in an environment of its own
	bash .ci/run
