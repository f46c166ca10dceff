# Needs Python >= 3.10 and make; everything else is installed into .venv.
PYTHON ?= python3

BIN := .venv/bin
INSTALLED := .venv/.installed

SAMPLE := sample_checkpoints/imagenet_dataparallel_cuda3.pth
MODEL := sample_checkpoints.models:resnet_tiny
REPAIRED := build/demo.pth

# What is measured beside ckptfix is installed apart: nobody needs it for anything else.
BENCH_BIN := .venv-bench/bin
BENCH_INSTALLED := .venv-bench/.installed
BENCH ?= --readme benchmarks/README.md
JUDGED_INSTALLED := .venv-bench/.judged-installed

.PHONY: help install demo test bench judgement lint types format samples clean

help:
	@echo "make demo     repair a sample checkpoint against a sample model"
	@echo "make test     lint, types and tests"
	@echo "make bench    measure speed and memory beside cp and peers (15 minutes, 20 GB of disk)"
	@echo "make judgement  measure how often the value rules are right (10 minutes on two cores)"
	@echo "make format   apply the formatter and the safe lint fixes"
	@echo "make samples  rebuild sample_checkpoints/"
	@echo "make clean    remove .venv and what was built"

install: $(INSTALLED)

# The stamp is younger than the two files that decide what is installed, or the install runs again.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	@mkdir -p $(dir $(REPAIRED)) && rm -f $(REPAIRED)
	$(BIN)/ckptfix repair $(SAMPLE) --model $(MODEL) -o $(REPAIRED)
	@echo
	@echo "Now with torch alone:"
	$(BIN)/python -c "import torch; from sample_checkpoints.models import resnet_tiny; \
	print(resnet_tiny().load_state_dict(torch.load('$(REPAIRED)', weights_only=True)['state_dict'], strict=True))"

test: lint types $(INSTALLED)
	$(BIN)/pytest -n 2

bench: $(BENCH_INSTALLED)
	$(BENCH_BIN)/python -m benchmarks.speed $(BENCH)

$(BENCH_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	$(BENCH_BIN)/python -m pip install --quiet -c constraints.txt -e . timm==1.0.31 torchvision
	@touch $@

judgement: $(JUDGED_INSTALLED)
	$(BENCH_BIN)/python -m benchmarks.judgement page

# Built without their weights; the versions decide which models there are.
$(JUDGED_INSTALLED): $(BENCH_INSTALLED)
	$(BENCH_BIN)/python -m pip install --quiet -c constraints.txt transformers==5.23.0 peft==0.21.2 \
	diffusers==0.42.1
	@touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

samples: $(INSTALLED)
	$(BIN)/python -m sample_checkpoints.build

clean:
	rm -rf .venv .venv-bench build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
