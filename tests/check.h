/* check.h: what a rank's program asserts. cmocka's assertions are for the main thread alone: a rank
   returns what is wrong as an error of its own, which ft_launch hands to the test.

   Include after femtotron.h. */

#ifndef CHECK_H
#define CHECK_H

#include <string.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return ft_error(FT_ERR_DATA, "line %d: %s (last error: %s)", __LINE__, #condition,     \
                            ft_last_error());                                                      \
    } while (0)

/* `call` must fail with `status`, and its message must contain `part`. */
#define REFUSED(call, status, part)                                                                \
    do {                                                                                           \
        ft_status refused_ = (call);                                                               \
        if (refused_ != (status) || !strstr(ft_last_error(), part))                                \
            return ft_error(FT_ERR_DATA, "line %d: %s gave %s: %s", __LINE__, #call,               \
                            ft_status_name(refused_), refused_ ? ft_last_error() : "");            \
    } while (0)

#endif /* CHECK_H */
