/* Errors: how a function says what went wrong. Owns nothing; never allocates or prints. */
#ifndef DSPARK_BASE_STATUS_H
#define DSPARK_BASE_STATUS_H

#include "dspark/dspark.h"

#if defined(__GNUC__)
#define DSPARK__PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define DSPARK__PRINTF(fmt, args)
#endif

/* Fill *err (which may be NULL) and return `code`. `where` names file, tensor or field (may be
 * NULL: ""), the rest is one sentence with what was expected and found. Text that does not fit is
 * cut on a UTF-8 boundary; control characters and broken UTF-8 of hostile names show as '?'. */
dspark_status dspark__fail(dspark_error *err, dspark_status code, const char *where,
                           const char *fmt, ...) DSPARK__PRINTF(4, 5);

/* The common one: "out of memory: N bytes for WHAT". */
dspark_status dspark__fail_nomem(dspark_error *err, const char *what, uint64_t bytes);

/* DSPARK_ENOMEM for memory and descriptors that ran out (ENOMEM, EMFILE, ENFILE), else DSPARK_EIO. */
dspark_status dspark__status_of_errno(int error_number);

/* A refused call: "WHAT: text of error_number" with the status above. */
dspark_status dspark__fail_errno(dspark_error *err, const char *where, const char *what,
                                 int error_number);

/* The same about an output: DSPARK_ENOMEM or DSPARK_EOUTPUT. */
dspark_status dspark__fail_output(dspark_error *err, const char *where, const char *what,
                                  int error_number);

/* Reset *err to DSPARK_OK and empty strings; NULL allowed. */
void dspark__error_clear(dspark_error *err);

/* "DSPARK_EMODEL"; "DSPARK_?" for a value that is no code. Static storage. */
const char *dspark__status_name(dspark_status code);

#endif
