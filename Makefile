# What CI runs is what people run. Each target first sets up what is missing in .venv (seconds, once it is there).

.PHONY: setup train smoke test test-unit test-all chaos lint image

setup:
	launch/setup.sh

train:
	launch/setup.sh horovodrun -np 2 -H localhost:2 python -m ringtrain.train --config configs/digits.toml

smoke:
	launch/smoke.sh

# Tests of each kind; the rest, marked slow, is what pytest calls deselected.
test:
	launch/setup.sh python -m pytest -m "not slow" tests
	@echo "Left out: the tests marked slow (deselected above), and what was skipped for the reasons above. All: make test-all"

test-unit:
	launch/setup.sh python -m pytest -m "unit and not slow" tests/unit

test-all:
	launch/setup.sh python -m pytest tests

chaos:
	RINGTRAIN_CHAOS=full launch/setup.sh python -m pytest tests/faults

lint:
	launch/setup.sh ruff check . && launch/setup.sh ruff format --check . && launch/setup.sh mypy ringtrain \
		&& launch/setup.sh lint-imports --no-logo --no-cache \
		&& launch/setup.sh python tests/support/house.py

image:
	tests/cluster/image.sh
