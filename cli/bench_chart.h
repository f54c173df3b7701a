/* bench_chart: panels of lines or bars as one self-contained SVG, without scripts, fonts or anything from
 * outside, readable on light and on dark pages. Knows numbers and names, nothing about measurements. */
#ifndef DSPARK_CLI_BENCH_CHART_H
#define DSPARK_CLI_BENCH_CHART_H

#include <stddef.h>
#include <stdio.h>

#define CHART_MAX_SERIES 8
#define CHART_MAX_POINTS 64
#define CHART_MAX_BARS 48
#define CHART_COLOURS 6

typedef struct chart_series {
    char name[64];
    double x[CHART_MAX_POINTS], y[CHART_MAX_POINTS]; /* by ascending x */
    double limit[CHART_MAX_POINTS]; /* drawn dashed; 0 = none */
    unsigned char hollow[CHART_MAX_POINTS];
    size_t n;
} chart_series;

typedef struct chart_bar {
    char name[64], note[48];        /* the note stands behind the bar */
    double value, limit;            /* limit: a mark; 0 = none */
    int colour;
} chart_bar;

typedef struct chart_panel {
    char title[128];
    const char *x_title, *y_title;  /* of bars: x_title only */
    int log_x, log_y;
    double rule;                    /* a dashed line at this y, 0 = none */
    const char *limit_name;         /* what dashed lines and marks are */
    const char *hollow_name;        /* what hollow points are */
    chart_series series[CHART_MAX_SERIES];
    size_t n_series;
    chart_bar bars[CHART_MAX_BARS];
    size_t n_bars;                  /* more than 0: bars, no lines */
} chart_panel;

/* Append; silently nothing when it is full. */
chart_series *chart_find_series(chart_panel *p, const char *name);
void chart_add_point(chart_series *s, double x, double y, double limit, int hollow);
void chart_add_bar(chart_panel *p, const char *name, const char *note, double value, double limit, int colour);

/* One panel wide, several in two columns. */
void chart_write(FILE *f, const char *title, const char *subtitle, const chart_panel *panels, size_t n);

#endif
