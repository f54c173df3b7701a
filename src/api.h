/* What the files of exported functions share. */
#ifndef DSPARK_API_H
#define DSPARK_API_H

#include "base/status.h"

/* Copy a caller's options over the defaults in `own`: an older caller's struct is shorter. NULL keeps
 * the defaults. Clears *err. */
dspark_status dspark__take_opts(void *own, size_t own_size, const void *theirs, const char *what,
                                dspark_error *err);
dspark_status dspark__fail_null(dspark_error *err, const char *what);

#endif
