/* as_gpu.h: makes a test of the CPU one of the GPU. The build includes the femtotron headers, then
   this, then the test's own .c file: wherever that launches on the CPU, it runs on FT_GPU, and plans
   are made for it. */

#ifndef AS_GPU_H
#define AS_GPU_H

static ft_status as_gpu_launch(const ft_config *config, ft_rank_fn fn, void *user)
{
    ft_config on_gpu = *config;
    if (on_gpu.device == FT_CPU) on_gpu.device = FT_GPU;
    on_gpu.plan_for = FT_GPU;
    return ft_launch(&on_gpu, fn, user);
}

#define ft_launch as_gpu_launch

#endif /* AS_GPU_H */
