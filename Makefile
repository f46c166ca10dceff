# Needs Python >= 3.10 and make; everything else is installed into .venv.
PYTHON ?= python3

BIN := .venv/bin
INSTALLED := .venv/.installed
TEST_INSTALLED := .venv/.test-installed
DOCS_INSTALLED := .venv/.docs-installed

SAMPLE := sample_checkpoints/imagenet_dataparallel_cuda3.pth
MODEL := sample_checkpoints.models:resnet_tiny
REPAIRED := build/demo.pth

# The chart and table libraries of the HTML report, kept in the repository as they come from the npm registry.
VENDOR := ckptfix/report/page/assets/vendor
UPLOT := uplot@1.6.32
TABULATOR := tabulator-tables@6.5.3

# What is measured beside ckptfix is installed apart: nobody needs it for anything else.
BENCH_BIN := .venv-bench/bin
BENCH_INSTALLED := .venv-bench/.installed
BENCH ?= --readme benchmarks/README.md

# Apart from these: beside a torch without CUDA, torchaudio does not import, and transformers imports it where it is.
KNOWN_BIN := .venv-known/bin
KNOWN_INSTALLED := .venv-known/.installed

.PHONY: help install demo quick test docs bench judgement structures lint types format samples vendor screenshot clean

help:
	@echo "make demo     repair a sample checkpoint against a sample model"
	@echo "make quick    lint, and the tests of the core (half a minute)"
	@echo "make test     lint, types and all tests (six minutes on two cores)"
	@echo "make docs     build the site into build/site"
	@echo "make bench    measure speed and memory beside cp and peers (40 minutes, 20 GB of disk)"
	@echo "make judgement  measure how often the value rules are right (10 minutes on two cores)"
	@echo "make structures  rewrite the table of the known architectures (half an hour; KNOWN=timm for one library)"
	@echo "make format   apply the formatter and the safe lint fixes"
	@echo "make samples  rebuild sample_checkpoints/"
	@echo "make vendor   fetch the libraries of the HTML report again, and prove that they are the same (needs npm)"
	@echo "make screenshot  photograph a report for docs/ (needs chromium)"
	@echo "make clean    remove .venv and what was built"

install: $(INSTALLED)

# The stamp is younger than the files that decide what is installed and built, or the install runs again.
$(INSTALLED): pyproject.toml constraints.txt hatch_build.py ckptfix/values/kernel.c
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

# Without Ray, an S3 server or a browser.
quick: lint $(INSTALLED)
	$(BIN)/pytest -n 2 -q -m "not slow" tests/core tests/bytes tests/writing tests/engine tests/rules/test_manuals.py tests/test_architecture.py

# Many tests wait for processes that they start: three workers on two cores, which take tests from each other (5:50; 6:09
# without that).
test: lint types $(TEST_INSTALLED)
	$(BIN)/pytest -n 3 --dist worksteal

$(TEST_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,test-page,test-zoo,test-peers]'
	@touch $@

docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

# `tests/peers` lets torchvision import beside a torch without CUDA, and with it transformers.
bench: $(BENCH_INSTALLED)
	PYTHONPATH=tests/peers $(BENCH_BIN)/python -m benchmarks.speed $(BENCH)

judgement: $(BENCH_INSTALLED)
	PYTHONPATH=tests/peers $(BENCH_BIN)/python -m benchmarks.judgement page

# The versions decide which models there are.
PEERS := timm==1.0.31 torchvision transformers==5.23.0 diffusers==0.42.1

$(BENCH_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	$(BENCH_BIN)/python -m pip install --quiet -c constraints.txt -e . $(PEERS) peft==0.21.2
	@touch $@

# The libraries whose models ckptfix knows without them.
KNOWN ?= timm torchvision transformers diffusers open_clip smp segment_anything torchaudio dinov2

structures: $(KNOWN_INSTALLED)
	PYTHONPATH=tests/peers $(KNOWN_BIN)/python -m benchmarks.structures $(KNOWN)

$(KNOWN_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-known
	$(KNOWN_BIN)/python -m pip install --quiet -c constraints.txt -e . $(PEERS) open_clip_torch==3.3.0 \
	segmentation-models-pytorch==0.6.0 segment-anything==1.0 torchaudio==2.11.0
	$(KNOWN_BIN)/python -m pip install --quiet --no-deps git+https://github.com/facebookresearch/dinov2@b8931f7bf91576930313be2c6d6af376033b35f0
	@touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(TEST_INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

samples: $(INSTALLED)
	$(BIN)/python -m sample_checkpoints.build

# A new version: change the name above, run this, then `sha256sum` the files into SHA256SUMS and look at the page.
vendor:
	rm -rf build/vendor && mkdir -p build/vendor/uplot build/vendor/tabulator
	cd build/vendor && npm pack --silent $(UPLOT) $(TABULATOR)
	tar -xzf build/vendor/uplot-*.tgz -C build/vendor/uplot --strip-components 1
	tar -xzf build/vendor/tabulator-tables-*.tgz -C build/vendor/tabulator --strip-components 1
	cp build/vendor/uplot/dist/uPlot.iife.min.js $(VENDOR)/uplot.min.js
	cp build/vendor/uplot/dist/uPlot.min.css $(VENDOR)/uplot.min.css
	cp build/vendor/uplot/LICENSE $(VENDOR)/uplot.LICENSE
	cp build/vendor/tabulator/dist/js/tabulator.min.js $(VENDOR)/tabulator.min.js
	cp build/vendor/tabulator/dist/css/tabulator_simple.min.css $(VENDOR)/tabulator.min.css
	cp build/vendor/tabulator/LICENSE $(VENDOR)/tabulator.LICENSE
	cd $(VENDOR) && sha256sum --check SHA256SUMS

screenshot: $(TEST_INSTALLED)
	$(BIN)/python -m tests.report.page.screenshot docs/report.png

clean:
	rm -rf .venv .venv-bench .venv-known build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
