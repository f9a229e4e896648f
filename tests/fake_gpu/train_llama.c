/* train_llama.c: the trainer on fake GPUs. */

#include "examples/train_llama.c"
#include "tests/fake_gpu/fake_gpu.h"
