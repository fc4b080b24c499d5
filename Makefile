.PHONY: fast lint ci night figures

fast: lint  # the inner loop
	pytest -n 2 --dist worksteal -q -p no:cacheprovider -m "not slow"

lint:
	ruff check . && ruff format --check . && mypy

ci:  # what must hold, in an environment of its own
	bash .ci/run

night:  # the same and tests marked nightly, every dtype, both versions of Triton in full
	EVERYTHING=1 bash .ci/run

figures:  # of README and docs/figures.md, from the records in measurements/records
	python measurements/figures.py
