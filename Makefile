# The two commands: `make demo` and `make test`. Both install what is missing
# (Debian or Ubuntu, as root) and work on a fresh machine.

.PHONY: demo test lint bench setup clean

demo: setup
	cargo build --release --workspace --bins
	target/release/kspeed-bench demo

test: setup
	cargo nextest run --workspace

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

bench: setup
	cargo build --release --workspace --bins
	target/release/kspeed-bench run

setup:
	@scripts/setup

clean:
	cargo clean
