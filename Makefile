# Three commands for everybody: `make demo`, `make demo-real` and `make test`. ARGS goes to the program:
#   make demo ARGS="--agent script run.seed=3"
.PHONY: demo demo-real test test-fast test-numeric test-full setup check docs conformance warm-start

demo:
	@scripts/setup
	@.venv/bin/insitu demo $(ARGS)

# The same with a real model of 135 million parameters and short Python functions. ARGS="--model FOLDER" takes yours.
demo-real:
	@scripts/setup real
	@.venv/bin/insitu demo $(if $(findstring --model,$(ARGS)),,--model smollm2) $(ARGS)

test:
	@scripts/setup test
	@scripts/check
	@scripts/test $(ARGS)

# Quick tests that start no process, within 90 s.
test-fast:
	@scripts/setup test
	@scripts/test --fast $(ARGS)

# The documentation, into site/.
docs:
	@scripts/setup test
	@scripts/docs

# Whatever compares floating-point numbers, with the kernels of CPUs without AVX-512 and without AVX2.
test-numeric:
	@scripts/setup test
	@ATEN_CPU_CAPABILITY=avx2 scripts/test -m numeric $(ARGS)
	@ATEN_CPU_CAPABILITY=default scripts/test -m numeric $(ARGS)

# Agents at other versions than the pinned ones. Pi 1.6 is not the pin: the demo's warm start has learnt the prompts
# of 0.87.1 and solves nothing inside 1.6.0.
OTHER_VERSIONS = pi@1.6.0,pi@0.86.1,pi@0.85.1,qwen_code@0.23.4,codex@0.166.0

# What takes too long for every change: a real vLLM server, a docker daemon, large
# fuzz counts, the real agents. CI runs it too.
test-full:
	@scripts/setup test
	@scripts/setup-vllm
	@scripts/setup-daemons
	@scripts/setup-extras >/dev/null
	@INSITU_FULL=1 INSITU_FUZZ=20000 scripts/test -m "full or fuzz" $(ARGS)
	@scripts/test-bridges
	@scripts/test-fleet
	@$(MAKE) --no-print-directory conformance ARGS=
	@$(MAKE) --no-print-directory conformance ARGS="--agents $(OTHER_VERSIONS)"
	-@scripts/newest  # another's release that fails is a finding, no fault of this change

setup:
	@scripts/setup test

check:
	@scripts/check

# Real agents from npm and PyPI, some 2 GB the first time, in sandboxes against a scripted policy.
conformance:
	@scripts/setup
	@.venv/bin/insitu conformance $(ARGS)

# Records the demonstrations and trains the warm start again, then puts it into the package.
warm-start:
	@scripts/setup
	@.venv/bin/python -m insitu_train.demo.make_warm_start
