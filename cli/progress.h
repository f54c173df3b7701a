/* progress: one bar on stderr, only when stderr is a terminal, and the way by which Ctrl-C reaches
 * long library calls. progress_update has the type dspark_progress. */
#ifndef DSPARK_CLI_PROGRESS_H
#define DSPARK_CLI_PROGRESS_H

#include <stdint.h>

typedef enum progress_unit { PROGRESS_BYTES, PROGRESS_ROWS, PROGRESS_STEPS } progress_unit;

typedef struct progress {
    const char *label;
    progress_unit unit;
    double started; /* seconds */
    double drawn;   /* when the bar was last drawn */
    int terminal;
    int visible;
} progress;

void progress_start(progress *bar, const char *label, progress_unit unit);
/* user is a progress. Returns non-zero when the user asked to stop. */
int progress_update(void *user, uint64_t done, uint64_t total);
/* Take the bar off the screen. */
void progress_end(progress *bar);

#endif
