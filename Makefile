# What CI runs is what people run. Each target first sets up what is missing in .venv (seconds, once it is there).

.PHONY: setup train smoke test test-unit test-all test-rest chaos fuzz simulate figures lint docs dist wheels release image

setup:
	launch/setup.sh

train:
	launch/setup.sh horovodrun -np 2 -H localhost:2 python -m ringtrain.train --config configs/digits.toml

smoke:
	launch/smoke.sh

# Two tests at a time, as those that start ranks have time limits which two cores do not keep with three. Those that mostly
# wait come first.
pytest = launch/setup.sh python -m pytest -n 2
ranks = $(pytest) --sample --dist loadscope --no-loadscope-reorder --durations=40 --durations-min=20
folders = tests/cluster tests/spark tests/faults tests/ring
alone = tests/unit tests/simulation

# What shows that ringtrain works on this machine.
test:
	$(ranks) -m quick $(folders) $(alone)
	@echo "Left out: the tests without the mark quick, and what was skipped for the reasons above. All of them: make test-all"

# The tests that start no ranks: before each commit.
test-unit:
	$(pytest) --dist worksteal -m "not slow" $(alone)

test-all:
	status=0; $(MAKE) test || status=1; $(MAKE) test-rest || status=1; exit $$status

# What the last `make test` has not passed, drawn jobs, and a sample of the mutants. A job of a new seed that fails is printed, and
# does not decide: it joins tests/fuzz/corpus.txt, whose jobs do.
test-rest:
	status=0; $(pytest) --rest --dist worksteal $(alone) || status=1; $(ranks) --rest $(folders) || status=1; \
		launch/setup.sh python tests/fuzz/run.py --corpus --minutes 0 || status=1; \
		launch/setup.sh python tests/fuzz/run.py --minutes 3 --no-shrink; \
		launch/setup.sh python tests/support/mutants.py --sample 3 || status=1; exit $$status

chaos:
	RINGTRAIN_CHAOS=full launch/setup.sh python -m pytest tests/faults

# Jobs that nobody wrote, on two ranks against Keras' own fit; a failure is printed as a script.
MINUTES = 10
fuzz:
	launch/setup.sh python tests/fuzz/run.py --minutes $(MINUTES)

# Production code on simulated hosts with faults, from new seeds; a violation is printed with its seed.
simulate:
	status=0; for scenario in launched elastic power; do \
		launch/setup.sh python tests/simulation/run.py $$scenario --minutes 0.5 || status=1; done; exit $$status

# Measures the trainers on an idle host, and writes the table of docs/performance.md and the plot of the README.
figures:
	launch/setup.sh python benchmarks/measure_peers.py --turns 3 --out figures.json
	launch/setup.sh python benchmarks/figures.py figures.json

lint:
	launch/setup.sh ruff check . && launch/setup.sh ruff format --check . && launch/setup.sh mypy ringtrain \
		&& launch/setup.sh lint-imports --no-logo --no-cache \
		&& launch/setup.sh python tests/support/house.py

# Pages of docs/ as a site, in site/; a dead link is an error (with --quiet it would be none).
docs:
	launch/setup.sh python -m pip install --quiet --disable-pip-version-check --require-hashes --constraint hashes.txt mkdocs mkdocs-material
	NO_MKDOCS_2_WARNING=1 launch/setup.sh python -m mkdocs build --strict

# Wheels and sdists of ringtrain and ringtrain-horovod, in dist/.
dist:
	launch/setup.sh python packaging/dist.py

# All wheels that a host without a network needs, in wheelhouse/.
wheels:
	launch/setup.sh python packaging/wheels.py

# dist/ with checksums and notes, its metadata checked: CONTRIBUTING.md.
release:
	launch/setup.sh python packaging/release.py

image:
	tests/cluster/image.sh
