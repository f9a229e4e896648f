# Femtotron's headers need no build. This file runs the trainer, the tests and the checks.
#
#   CC=clang          another compiler (default: cc, gcc or clang, the first that is here)
#   CBLAS=1           the trainer's GEMMs call OpenBLAS; default 0, the built-in loops
#   JOBS=N            compilers at a time when tests are built
#   TEST_TIMEOUT=N    seconds after which a test program is killed and counts as failed
#   NVCC=..., GPU_ARCH="..."   for make cuda: the compiler (default nvcc), and its -gencode flags
#   TESTS="..."       test programs by name, without directory: make test TESTS=test_io

ifeq ($(origin CC),default)
CC := $(or $(shell for c in cc gcc clang; do command -v $$c >/dev/null && echo $$c && break; done),\
    cc)
endif
JOBS ?= $(or $(shell nproc 2>/dev/null),2)
TEST_TIMEOUT ?= 600
CBLAS ?= 0

.DEFAULT_GOAL := help
.SUFFIXES:
.DELETE_ON_ERROR:

HEADERS := $(sort $(wildcard *.h))
TEST_HEADERS := $(sort $(wildcard tests/*.h))
TESTS ?= $(sort $(patsubst tests/%.c,%,$(wildcard tests/test_*.c)))
TEST_SCRIPTS ?= $(sort $(wildcard tests/test_*.sh))

WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wvla -Werror
C_FLAGS := -std=c11 $(WARNINGS) -I.
SYSTEM_LIBS := -lm -lpthread

# OpenBLAS shall not start threads of its own: every rank is a thread already.
export OPENBLAS_NUM_THREADS := 1

# Sub-makes share the jobs of an outer make -j; without one they get JOBS.
PARALLEL = $(if $(findstring j,$(firstword -$(MAKEFLAGS))),,-j$(JOBS))
SUBMAKE = $(MAKE) --no-print-directory

.PHONY: help
help: ## print this list
	@sed -n -e 's/test_%:/test_NAME:/' -e 's/^\([a-zA-Z_/]*\):[^#]*## \(.*\)/\1|\2/p' Makefile | \
	while IFS='|' read -r target text; do printf '  make %-20s %s\n' "$$target" "$$text"; done

# ----------------------------------------------------------------------------------------- trainer

# The compiler must be able to make a program: a C library without its headers is not enough.
.PHONY: compiler
compiler:
	@mkdir -p build
	@printf '#include <stdio.h>\n#include <math.h>\nint main(void) { return 0; }\n' \
	    > build/compiler.c; \
	if ! $(CC) build/compiler.c -o build/compiler -lm -lpthread > build/compiler.log 2>&1; then \
	    cat build/compiler.log >&2; \
	    echo "error: no working C compiler ($(CC)). Install one, for instance:" >&2; \
	    echo "  Debian, Ubuntu: apt-get install gcc libc6-dev     Fedora: dnf install gcc" >&2; \
	    echo "  Alpine: apk add gcc musl-dev                      macOS: xcode-select --install" >&2; \
	    exit 1; \
	fi

# The flag that lets the compiler use all of this processor, where it knows one.
native = $(shell for flag in -march=native -mcpu=native; do \
    $(CC) $$flag -c build/compiler.c -o build/compiler.o >/dev/null 2>&1 && echo $$flag && break; \
    done)

# With cJSON and xxHash, for checkpoints, where they are here.
ifeq ($(CBLAS),1)
TRAINER_FEATURES = $$FT_CFLAGS
TRAINER_LIBS = $$FT_LIBS
else
TRAINER_FEATURES = $$FT_PLAIN_CFLAGS
TRAINER_LIBS = $$FT_PLAIN_LIBS
endif

build/train_llama: examples/train_llama.c $(HEADERS) build/features ## the single-file trainer
	@. build/features; set -x; $(CC) -std=c11 -I. -O3 $(native) $(TRAINER_FEATURES) $< -o $@ \
	    $(TRAINER_LIBS) $(SYSTEM_LIBS)

# The trainer for GPUs: machine code for Ampere and Hopper, and PTX that the driver compiles for others.
NVCC ?= nvcc
GPU_ARCH ?= -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a \
    -gencode arch=compute_90,code=compute_90

.PHONY: cuda
cuda: build/train_llama_cuda ## the single-file trainer for GPUs (needs the CUDA Toolkit)

build/femtotron_kernels.o: femtotron_kernels.cu femtotron.h
	@mkdir -p $(@D)
	@command -v $(NVCC) >/dev/null || { echo "error: $(NVCC) is not here: install the CUDA" \
	    "Toolkit (12.4 or later) and put its bin/ on PATH, or set NVCC" >&2; exit 1; }
	$(strip $(NVCC) -O3 -DFT_CUDA -I. $(GPU_ARCH) -c $< -o $@)

# With cJSON and xxHash, and with NCCL, where they are.
cuda_features = $(shell sh tools/features.sh "$(NVCC)" | sed -n "s/^FT_PLAIN_[A-Z]*='\(.*\)'/\1/p")
nccl = $(shell echo '\#include <nccl.h>' | $(NVCC) -E -x cu - >/dev/null 2>&1 && echo -DFT_NCCL -lnccl)

build/train_llama_cuda: examples/train_llama.c build/femtotron_kernels.o $(HEADERS)
	$(strip $(NVCC) -O3 -DFT_CUDA -I. $(GPU_ARCH) $< build/femtotron_kernels.o -o $@ -lcublasLt \
	    $(cuda_features) $(nccl))

build/memory_tables_cuda: examples/memory_tables.c examples/train_llama.c \
    build/femtotron_kernels.o $(HEADERS)
	$(strip $(NVCC) -O3 -DFT_CUDA -I. $(GPU_ARCH) $< build/femtotron_kernels.o -o $@ -lcublasLt)

# Tests that need a GPU; tests/gpu/run.sh runs them.
build/gpu/test_attention: tests/gpu/test_attention.cu femtotron_kernels.cu femtotron.h
	@mkdir -p $(@D)
	$(strip $(NVCC) -O3 -I. $(GPU_ARCH) -DFT_ATTENTION_DEFAULT_TILES $< -o $@)

build/gpu/train_same: tests/gpu/train_same.c build/femtotron_kernels.o $(HEADERS)
	@mkdir -p $(@D)
	$(strip $(NVCC) -O2 -DFT_CUDA -DFT_CJSON -DFT_XXHASH -I. $(GPU_ARCH) $< \
	    build/femtotron_kernels.o -o $@ -lcublasLt -lcjson -lxxhash)

build/gpu/test_kernels: tests/gpu/test_kernels.c build/femtotron_kernels.o $(HEADERS)
	@mkdir -p $(@D)
	$(strip $(NVCC) -O2 -DFT_CUDA -I. $(GPU_ARCH) $< build/femtotron_kernels.o -o $@ -lcublasLt)

# They run the trainer's own step on meta.
build/memory_tables: examples/memory_tables.c examples/train_llama.c $(HEADERS) | compiler ## peak memory of 48 cells beside a log's
	$(CC) -std=c11 -I. -O2 $< -o $@ $(SYSTEM_LIBS)

build/memplan: examples/memplan.c examples/train_llama.c $(HEADERS) build/features ## memory, traffic, what fits: without a GPU
	@. build/features; set -x; $(CC) -std=c11 -I. -O2 $$FT_PLAIN_CFLAGS $< -o $@ $$FT_PLAIN_LIBS \
	    $(SYSTEM_LIBS)

# The project's own text, in an order that is the same everywhere; the first file begins the sample.
RUN_DATA := $(HEADERS) $(sort $(wildcard examples/*.c tests/*.c tests/*.h tests/compile/* \
    tools/*.sh README.md Makefile))
RUN_FLAGS := --dp 4 --zero-stage 3 --sac selective --tie-embeddings --micro-batch-size 2 \
    --steps 600 --lr 0.003 --warmup 30 --lr-schedule cosine --lr-floor 0.0003 --sample 400

.PHONY: run
run: build/train_llama ## train a Llama on this project's source, 4 ranks, ZeRO-3; then it writes
	build/train_llama --data $(RUN_DATA) $(RUN_FLAGS)

.PHONY: bench
bench: build/train_llama build/bench_gemm build/bench_step ## GEMM speed; tokens/s and peak of every stage and policy
	@build/bench_gemm
	@build/bench_step
	@sh tools/bench.sh build/train_llama

# The built-in GEMM beside OpenBLAS's.
build/bench_gemm: tests/bench_gemm.c $(HEADERS) build/features
	@. build/features; set -x; $(CC) -std=c11 -I. -O3 $(native) \
	    $$(echo "$$FT_CFLAGS" | sed s/-DFT_CBLAS//) $< -o $@ $$FT_LIBS $(SYSTEM_LIBS)

# Where a step's time goes; with CBLAS if it is here.
build/bench_step: tests/bench_step.c $(HEADERS) $(TEST_HEADERS) build/features
	@. build/features; set -x; $(CC) -std=c11 -I. -O3 $(native) $$FT_CFLAGS $< -o $@ $$FT_LIBS \
	    $(SYSTEM_LIBS)

# ------------------------------------------------------------------------------------------- tests

# What this machine has of CBLAS, cJSON and xxHash; touched only when that changes.
.PHONY: force
build/features: force | compiler
	@sh tools/features.sh "$(CC)" > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# How a test is built: its own file brings in the implementation of every header it uses.
TEST_SOURCE = $(filter tests/%.c,$^)
build_test = rm -f $@; . build/features; set -x; \
    $(CC) $(C_FLAGS) -O2 -g $(1) $(TEST_SOURCE) -o $@ $(2) -lcmocka $(SYSTEM_LIBS)

build/test_%: tests/test_%.c $(HEADERS) $(TEST_HEADERS) build/features ## one test program
	@$(call build_test,$$FT_CFLAGS,$$FT_LIBS)

# The same without CBLAS: the built-in loops.
build/plain/test_%: tests/test_%.c $(HEADERS) $(TEST_HEADERS) build/features
	@mkdir -p $(@D)
	@$(call build_test,$$FT_PLAIN_CFLAGS,$$FT_PLAIN_LIBS)

# Sanitizers too see the built-in loops: OpenBLAS is not instrumented.
# They make gcc see truncations and uninitialised values that are none: warnings stay warnings.
SANITIZE := -Wno-error -fno-omit-frame-pointer -O1
ASAN := $(SANITIZE) -fsanitize=address,undefined -fno-sanitize-recover=all
TSAN := $(SANITIZE) -fsanitize=thread
build/asan/test_%: tests/test_%.c $(HEADERS) $(TEST_HEADERS) build/features
	@mkdir -p $(@D)
	@$(call build_test,$(ASAN) $$FT_PLAIN_CFLAGS,$$FT_PLAIN_LIBS)

build/tsan/test_%: tests/test_%.c $(HEADERS) $(TEST_HEADERS) build/features
	@mkdir -p $(@D)
	@$(call build_test,$(TSAN) $$FT_PLAIN_CFLAGS,$$FT_PLAIN_LIBS)

# Tests that include a program.
$(foreach dir,build build/plain build/asan build/tsan,$(dir)/test_memory_tables $(dir)/test_arena): \
    examples/memory_tables.c examples/train_llama.c

build/asan/train_llama: examples/train_llama.c $(HEADERS) build/features
	@mkdir -p $(@D)
	@. build/features; set -x; $(CC) $(C_FLAGS) -g $(ASAN) $$FT_PLAIN_CFLAGS $< -o $@ \
	    $$FT_PLAIN_LIBS $(SYSTEM_LIBS)

PLAIN_TESTS := $(filter test_ops test_golden,$(TESTS))
# Tests in which ranks talk to each other: the ones that run again with delays and under TSan.
RANK_TESTS ?= $(filter test_comm test_tp test_llama test_options test_3d,$(TESTS))
# The same for the sanitizers, under which programs are 3 to 15 times slower: these reach every part
# in minutes. make async RANK_TESTS="...", make asan ASAN_TESTS="...", make tsan TSAN_TESTS="..." run others.
ASAN_TESTS ?= $(filter test_comm test_io test_data test_ops test_tape test_llama test_options test_tp \
    test_pp_schedule,$(TESTS))
TSAN_TESTS ?= $(filter test_comm test_tp test_data test_3d test_arena,$(TESTS))
# Tests that run again with the caching allocator: all that launch ranks.
CACHING_TESTS ?= $(filter-out test_io test_data test_pp_schedule test_memory_tables test_arena,$(TESTS))

RUN_TESTS = sh tools/run_tests.sh -t $(TEST_TIMEOUT)

.PHONY: deps
deps: ## install what the tests need (root and apt-get), or name it
	@sh tools/deps.sh "$(CC)"

.PHONY: test
test: ## all tests on the CPU; installs what they need first
	@sh tools/deps.sh "$(CC)"
	@$(SUBMAKE) -k $(PARALLEL) test_programs || true
	@$(RUN_TESTS) $(addprefix build/,$(TESTS)) $(addprefix build/plain/,$(PLAIN_TESTS)) \
	    $(TEST_SCRIPTS)

.PHONY: examples
examples: | compiler ## build and run the ladder of examples, each against the output it shows
	@CC="$(CC)" sh tests/test_examples.sh

.PHONY: test_programs asan_programs tsan_programs
test_programs: $(addprefix build/,$(TESTS)) $(addprefix build/plain/,$(PLAIN_TESTS)) \
    build/train_llama
asan_programs: $(addprefix build/asan/,$(ASAN_TESTS))
tsan_programs: $(addprefix build/tsan/,$(TSAN_TESTS))

.PHONY: async
async: ## multi-rank tests again, with streams as threads and random delays
	@sh tools/deps.sh "$(CC)"
	@$(SUBMAKE) -k $(PARALLEL) $(addprefix build/,$(RANK_TESTS)) || true
	@FT_CPU_ASYNC=1 FT_DELAY_US=200 $(RUN_TESTS) -l build/logs/async \
	    $(addprefix build/,$(RANK_TESTS))

.PHONY: caching
caching: ## tests again, with memory from the caching allocator
	@sh tools/deps.sh "$(CC)"
	@$(SUBMAKE) -k $(PARALLEL) $(addprefix build/,$(CACHING_TESTS)) || true
	@FT_ALLOCATOR=caching $(RUN_TESTS) -l build/logs/caching $(addprefix build/,$(CACHING_TESTS))

.PHONY: asan
asan: ## tests and trainer under AddressSanitizer and UBSan
	@sh tools/deps.sh "$(CC)"
	@$(SUBMAKE) -k $(PARALLEL) asan_programs || true
	@sh tools/sanitize.sh asan "$(CC)" $(RUN_TESTS) -l build/logs/asan \
	    $(addprefix build/asan/,$(ASAN_TESTS))

.PHONY: tsan
tsan: ## multi-rank tests under ThreadSanitizer, streams as threads
	@sh tools/deps.sh "$(CC)"
	@$(SUBMAKE) -k $(PARALLEL) tsan_programs || true
	@FT_CPU_ASYNC=1 FT_DELAY_US=50 sh tools/sanitize.sh tsan "$(CC)" $(RUN_TESTS) \
	    -l build/logs/tsan $(addprefix build/tsan/,$(TSAN_TESTS))

.PHONY: check
check: | compiler ## compile checks: every header, C11 and C++17, gcc, clang, nvcc
	@sh tests/compile/check.sh

.PHONY: clean
clean: ## remove build/
	rm -rf build
