# Femtotron's headers need no build. This file runs the trainer, the tests and the checks.
#
#   CC=clang          another compiler (default: cc, gcc or clang, the first that is here)
#   CBLAS=1           the trainer's GEMMs call OpenBLAS; default 0, the built-in loops
#   JOBS=N            compilers at a time when tests are built, and compile checks at a time
#   TEST_JOBS=N       test programs at a time (default 2, where there are cores)
#   TEST_TIMEOUT=N    seconds after which a test program is killed and counts as failed
#   NVCC=..., GPU_ARCH="..."   for make cuda: the compiler (default nvcc), and its -gencode flags
#   FUZZ_SECONDS=N    of make fuzz, all fuzzers together; an hour: make fuzz FUZZ_SECONDS=3600
#   TESTS="..."       test programs by name, without directory: make test TESTS=test_io

ifeq ($(origin CC),default)
CC := $(or $(shell for c in cc gcc clang; do command -v $$c >/dev/null && echo $$c && break; done),\
    cc)
endif
JOBS ?= $(or $(shell nproc 2>/dev/null),2)
TEST_JOBS ?= $(if $(filter 1,$(JOBS)),1,2)
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

# The trainer for GPUs: machine code for Ampere and Hopper, and PTX that the driver compiles for
# others.
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
nccl = $(shell echo '\#include <nccl.h>' | $(NVCC) -E -x cu - >/dev/null 2>&1 && \
    echo -DFT_NCCL -lnccl)

build/train_llama_cuda: examples/train_llama.c build/femtotron_kernels.o $(HEADERS)
	$(strip $(NVCC) -O3 -DFT_CUDA -I. $(GPU_ARCH) $< build/femtotron_kernels.o -o $@ -lcublasLt \
	    $(cuda_features) $(nccl))

build/memory_tables_cuda: examples/memory_tables.c examples/train_llama.c \
    build/femtotron_kernels.o $(HEADERS)
	$(strip $(NVCC) -O3 -DFT_CUDA -I. $(GPU_ARCH) $< build/femtotron_kernels.o -o $@ -lcublasLt \
	    $(nccl))

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

build/gpu/nccl_mismatch: tests/gpu/nccl_mismatch.c build/femtotron_kernels.o $(HEADERS)
	@mkdir -p $(@D)
	$(strip $(NVCC) -O2 -DFT_CUDA -I. $(GPU_ARCH) $< build/femtotron_kernels.o -o $@ -lcublasLt \
	    $(nccl))

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
	@new=$@.$$$$; sh tools/features.sh "$(CC)" > $$new; \
	if cmp -s $$new $@; then rm $$new; else mv $$new $@; fi

# How a test is built. Its own file brings in the implementation of every header it uses; where that
# names FT_TEST_LINKED, it can leave this to an archive, which all such tests share.
LINKED_TESTS := $(basename $(notdir $(shell grep -l FT_TEST_LINKED tests/test_*.c)))
TEST_SOURCE = $(filter tests/%.c,$^)
TEST_ARCHIVE = $(filter %.a,$^)
compile_test = $(CC) $(C_FLAGS) -O2 -g1 $(1)
build_test = rm -f $@; . build/features; set -x; \
    $(call compile_test,$(1)) $(if $(TEST_ARCHIVE),-DFT_TEST_LINKED) $(TEST_SOURCE) -o $@ \
    $(TEST_ARCHIVE) $(2) -lcmocka $(SYSTEM_LIBS)

# The archive's parts: a header's implementation each, so that a test may bring its own of a header.
LIBRARY := femtotron femtotron_zero femtotron_tp femtotron_pp femtotron_llama femtotron_io
PART = $(or $(shell echo '$*' | sed 's/^femtotron_*//' | tr '[:lower:]' '[:upper:]'),CORE)
build_part = . build/features; set -x; \
    $(call compile_test,-D_POSIX_C_SOURCE=200809L -DFEMTOTRON_$(PART)_IMPLEMENTATION $(1)) \
    $(addprefix -include ,$(call bases,$*) $*.h) -x c -c /dev/null -o $@
bases = femtotron.h $(if $(filter femtotron_llama femtotron_io,$(1)),femtotron_zero.h \
    femtotron_tp.h) $(if $(filter femtotron_io,$(1)),femtotron_llama.h)

# Plain: without CBLAS, the built-in loops. Sanitizers too see those: OpenBLAS is not instrumented.
# They make gcc see truncations and uninitialised values that are none: warnings stay warnings.
SANITIZE := -Wno-error -fno-omit-frame-pointer -O1
ASAN := $(SANITIZE) -fsanitize=address,undefined -fno-sanitize-recover=all
TSAN := $(SANITIZE) -fsanitize=thread

# test_rules DIRECTORY,FLAGS,LIBS: programs and parts of one kind.
define test_rules
$(addprefix $(1)/,$(LINKED_TESTS)): $(1)/lib/libfemtotron.a

$(1)/test_%: tests/test_%.c $(HEADERS) $(TEST_HEADERS) build/features
	@mkdir -p $$(@D)
	@$$(call build_test,$(2),$(3))

$(1)/lib/femtotron_llama.o: $(call bases,femtotron_llama)
$(1)/lib/femtotron_io.o: $(call bases,femtotron_io)
$(1)/lib/%.o: %.h femtotron.h build/features
	@mkdir -p $$(@D)
	@$$(call build_part,$(2))

$(1)/lib/libfemtotron.a: $(addprefix $(1)/lib/,$(addsuffix .o,$(LIBRARY)))
	@rm -f $$@; ar rcs $$@ $$^
endef

build/test_%: ## one test program
$(eval $(call test_rules,build,$$$$FT_CFLAGS,$$$$FT_LIBS))
$(eval $(call test_rules,build/plain,$$$$FT_PLAIN_CFLAGS,$$$$FT_PLAIN_LIBS))
$(eval $(call test_rules,build/asan,$$(ASAN) $$$$FT_PLAIN_CFLAGS,$$$$FT_PLAIN_LIBS))
$(eval $(call test_rules,build/tsan,$$(TSAN) $$$$FT_PLAIN_CFLAGS,$$$$FT_PLAIN_LIBS))

# The GPU's side of the headers, on fake GPUs.
FAKE_GPU := $(wildcard tests/fake_gpu/*.h tests/fake_gpu/*/*.h)
$(foreach dir,build build/plain build/asan build/tsan,$(dir)/test_nccl): C_FLAGS += -Itests/fake_gpu
$(foreach dir,build build/plain build/asan build/tsan,$(dir)/test_nccl): $(FAKE_GPU)

build/fake/train_llama: tests/fake_gpu/train_llama.c examples/train_llama.c $(HEADERS) $(FAKE_GPU) \
    build/features
	@mkdir -p $(@D)
	@. build/features; set -x; $(CC) $(C_FLAGS) -Itests/fake_gpu -DFT_CUDA -DFT_NCCL -O2 \
	    $$FT_PLAIN_CFLAGS $< -o $@ $$FT_PLAIN_LIBS $(SYSTEM_LIBS)

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
# in minutes. make async RANK_TESTS="...", make asan ASAN_TESTS="...", make tsan TSAN_TESTS="..."
# run others.
ASAN_TESTS ?= $(filter test_comm test_nccl test_io test_data test_megatron test_jsonl test_documents \
    test_tensorboard test_ops test_tape test_llama test_options test_tp test_pp_schedule test_state \
    test_checkpoint test_hf,$(TESTS))
TSAN_TESTS ?= $(filter test_comm test_nccl test_tp test_data test_3d test_arena,$(TESTS))
# Tests that run again with the caching allocator: all that launch ranks.
CACHING_TESTS ?= $(filter-out test_io test_data test_megatron test_jsonl test_pp_schedule \
    test_memory_tables test_arena test_checkpoint,$(TESTS))

# Those that measure time, or in which short timeouts must not run out by chance, run alone.
ALONE := test_failure test_nccl test_memory_tables test_memplan.sh test_resume.sh test_trainer.sh
RUN_TESTS = sh tools/run_tests.sh -t $(TEST_TIMEOUT) -j $(TEST_JOBS) -a "$(ALONE)"

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
test_programs: build/train_llama build/fake/train_llama build/memplan $(addprefix build/,$(TESTS)) \
    $(addprefix build/plain/,$(PLAIN_TESTS))
asan_programs: $(addprefix build/asan/,$(ASAN_TESTS))
tsan_programs: $(addprefix build/tsan/,$(TSAN_TESTS))

.PHONY: async
async: ## multi-rank tests again, with streams as threads and random delays
	@sh tools/deps.sh "$(CC)"
	@$(SUBMAKE) -k $(PARALLEL) $(addprefix build/,$(RANK_TESTS)) || true
	@FT_CPU_ASYNC=1 FT_DELAY_US=100 $(RUN_TESTS) -l build/logs/async \
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

# Fuzzers: clang's libFuzzer with sanitizers. The parsers are instrumented; what they rest on is not.
FUZZ_CC ?= clang
FUZZ_SECONDS ?= 60
FUZZERS := $(basename $(notdir $(wildcard tests/fuzz/fuzz_*.c)))
FUZZ_HEADERS := tests/fuzz/fuzz.h
FUZZ_SANITIZE := -g -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
# The headers' implementations come from the archive, also where a program asks for them.
NO_IMPLEMENTATION := $(addprefix -D,FEMTOTRON_IMPLEMENTATION_DONE \
    FEMTOTRON_ZERO_IMPLEMENTATION_DONE FT__TP_IMPLEMENTED FT__PP_IMPLEMENTED \
    FT__LLAMA_IMPLEMENTED FEMTOTRON_IO_IMPLEMENTED)
fuzz_compile = . build/features; set -x; $(FUZZ_CC) -std=c11 -D_POSIX_C_SOURCE=200809L -I. \
    -Itests/fuzz -O1 $$FT_PLAIN_CFLAGS

build/fuzz/lib/femtotron_llama.o: $(call bases,femtotron_llama)
build/fuzz/lib/%.o: %.h femtotron.h build/features
	@mkdir -p $(@D)
	@$(fuzz_compile) -DFEMTOTRON_$(PART)_IMPLEMENTATION $(addprefix -include ,$(call bases,$*) $*.h) \
	    -x c -c /dev/null -o $@

build/fuzz/lib/femtotron_io.o: femtotron_io.h $(call bases,femtotron_io) tests/fuzz/heap_map.h \
    build/features
	@mkdir -p $(@D)
	@$(fuzz_compile) $(FUZZ_SANITIZE) -DFEMTOTRON_IO_IMPLEMENTATION \
	    $(addprefix -include ,$(call bases,femtotron_io) tests/fuzz/heap_map.h femtotron_io.h) \
	    -x c -c /dev/null -o $@

build/fuzz/lib/libfemtotron.a: $(addprefix build/fuzz/lib/,$(addsuffix .o,$(LIBRARY)))
	@rm -f $@; ar rcs $@ $^

build/fuzz/fuzz_config: examples/train_llama.c
build/fuzz/fuzz_%: tests/fuzz/fuzz_%.c build/fuzz/lib/libfemtotron.a $(FUZZ_HEADERS) $(HEADERS)
	@$(fuzz_compile) $(FUZZ_SANITIZE) -fsanitize=fuzzer $(NO_IMPLEMENTATION) $< -o $@ \
	    build/fuzz/lib/libfemtotron.a $$FT_PLAIN_LIBS $(SYSTEM_LIBS)

.PHONY: fuzz fuzz_programs
fuzz_programs: $(addprefix build/fuzz/,$(FUZZERS))
fuzz: ## every parser with made-up inputs, FUZZ_SECONDS (60) in all; FUZZERS="fuzz_NAME..." some
	@CC="$(FUZZ_CC)" sh tools/fuzz.sh -p || exit 1
	@sh tools/deps.sh "$(CC)"
	@$(SUBMAKE) -k $(PARALLEL) fuzz_programs || true
	@CC="$(FUZZ_CC)" sh tools/fuzz.sh -s $(FUZZ_SECONDS) -j $(TEST_JOBS) \
	    $(addprefix build/fuzz/,$(FUZZERS))

.PHONY: check
check: | compiler ## compile checks: every header, C11 and C++17, gcc, clang, nvcc
	@JOBS=$(JOBS) sh tests/compile/check.sh

.PHONY: clean
clean: ## remove build/
	rm -rf build
