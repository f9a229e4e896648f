/* as_gpu.h: makes a test of the CPU one of the GPU. The build includes the femtotron headers, then
   this, then the test's own .c file: wherever that asks for the CPU, it gets FT_GPU, and plans are
   made for it. */

#ifndef AS_GPU_H
#define AS_GPU_H

static ft_config as_gpu_config(void)
{
    ft_config config = ft_config_default();
    config.device = FT_GPU;
    config.plan_for = FT_GPU;
    return config;
}

#define ft_config_default as_gpu_config
#define FT_CPU FT_GPU

#endif /* AS_GPU_H */
