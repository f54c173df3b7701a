/* progress: one bar on stderr with rate and remaining time, drawn at most ten times a second. */
#include "progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "out.h"

#define BAR_WIDTH 30

void progress_start(progress *bar, const char *label, progress_unit unit)
{
    memset(bar, 0, sizeof *bar);
    bar->label = label;
    bar->unit = unit;
    bar->started = out_clock();
    bar->terminal = isatty(STDERR_FILENO) == 1;
}

static void draw_bar(progress *bar, uint64_t done, uint64_t total, double now)
{
    double share = total ? (double)done / (double)total : 1.0;
    double elapsed = now - bar->started;
    double rate = elapsed > 0 ? (double)done / elapsed : 0;
    double left = rate > 0 ? (double)(total - done) / rate : 0;
    char cells[BAR_WIDTH + 1], text[32];
    int filled = (int)(share * BAR_WIDTH), i;
    for (i = 0; i < BAR_WIDTH; i++) cells[i] = i < filled ? '#' : '.';
    cells[BAR_WIDTH] = 0;
    fprintf(stderr, "\r%-12s [%s] %3d%%", bar->label, cells, (int)(share * 100));
    if (bar->unit == PROGRESS_BYTES)
        fprintf(stderr, "  %s/s", out_bytes(text, rate));
    else
        fprintf(stderr, "  %.4g %s/s", rate, bar->unit == PROGRESS_ROWS ? "rows" : "steps");
    if (elapsed > 0.5 && rate > 0)
        fprintf(stderr, "  %d:%02d left", (int)(left / 60), (int)left % 60);
    fputs("\x1b[K", stderr);
    fflush(stderr);
    bar->visible = 1;
    bar->drawn = now;
}

int progress_update(void *user, uint64_t done, uint64_t total)
{
    progress *bar = user;
    if (bar && bar->terminal && done <= total) {
        double now = out_clock();
        /* Short work never flickers: the first bar comes after a fifth of a second. */
        if (now - bar->started > 0.2 && now - bar->drawn > 0.1) draw_bar(bar, done, total, now);
    }
    return out_interrupted();
}

void progress_end(progress *bar)
{
    if (bar->visible) {
        fputs("\r\x1b[K", stderr);
        fflush(stderr);
    }
    bar->visible = 0;
}
