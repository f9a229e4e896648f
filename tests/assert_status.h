/* assert_status.h: what a call gave, for the main thread of a test (a rank's program has check.h).

   Include after femtotron.h, with cmocka.h before. */

#ifndef ASSERT_STATUS_H
#define ASSERT_STATUS_H

#include <string.h>

static void assert_ok(ft_status status)
{
    if (status != FT_OK) fail_msg("%s", ft_last_error());
}

/* The status, and a message of one line that contains both strings. */
static void assert_error(ft_status status, ft_status wanted, const char *where, const char *reason)
{
    const char *message = ft_last_error();
    if (status != wanted)
        fail_msg("%s instead of %s for %s (%s)", ft_status_name(status), ft_status_name(wanted),
                 reason, status ? message : "");
    if (strstr(message, where) == NULL) fail_msg("\"%s\" does not name %s", message, where);
    if (strstr(message, reason) == NULL) fail_msg("\"%s\" does not say %s", message, reason);
    if (strchr(message, '\n') != NULL) fail_msg("\"%s\" is more than one line", message);
}

#endif /* ASSERT_STATUS_H */
