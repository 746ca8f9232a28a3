# Two commands for everybody: `make demo` and `make test`. ARGS goes to the program:
#   make demo ARGS="--agent script run.seed=3"
.PHONY: demo test setup check warm-start

demo:
	@scripts/setup
	@.venv/bin/whet demo $(ARGS)

test:
	@scripts/setup test
	@scripts/check
	@scripts/test $(ARGS)

setup:
	@scripts/setup test

check:
	@scripts/check

# Records the demonstrations and trains the warm start again, then puts it into the package.
warm-start:
	@scripts/setup
	@.venv/bin/python -m whet.demo.warm
