.PHONY: fast lint ci night figures site study

fast: lint  # the inner loop
	pytest -n 2 --dist worksteal -q -p no:cacheprovider -m "not slow"

lint:
	ruff check . && ruff format --check . && mypy

ci:  # what must hold, in an environment of its own
	bash .ci/run

night:  # the same and tests marked nightly, every dtype, both versions of Triton in full
	EVERYTHING=1 bash .ci/run

figures:  # docs/figures.md and the numbers in README and docs, from the records
	python measurements/figures.py
	python measurements/claims.py --write

site:  # the docs, into build/site; pip install -e ".[docs]"
	python -m sphinx -W --keep-going docs build/site

study:  # docs/study: text, figures and PDFs from the records; pip install -e ".[study]"
	python docs/study/build.py
