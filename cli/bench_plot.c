/* dspark bench: one drawing, time per position over positions in a call, both axes logarithmic, the
 * three paths and the one pass's roofline. Self-contained SVG without fonts or scripts of its
 * own. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "bench.h"
#include "out.h"

#define PLOT_WIDTH 860.0
#define PLOT_HEIGHT 520.0
#define LEFT 84.0
#define RIGHT 150.0
#define TOP 78.0
#define BOTTOM 62.0

typedef struct plot {
    FILE *f;
    double x_min, x_max, y_min, y_max; /* logarithms */
    size_t *order;                     /* rows by tokens */
} plot;

/* Colours that also differ in lightness, for those who see hues otherwise. */
static const char *const colours[BENCH_N_PATHS] = {"#0b5fa5", "#c2571a", "#7a7a7a"};

static double x_at(const plot *p, double tokens)
{
    double share = (log10(tokens) - p->x_min) / (p->x_max - p->x_min);
    return LEFT + share * (PLOT_WIDTH - LEFT - RIGHT);
}

static double y_at(const plot *p, double us)
{
    double share = (log10(us) - p->y_min) / (p->y_max - p->y_min);
    return PLOT_HEIGHT - BOTTOM - share * (PLOT_HEIGHT - TOP - BOTTOM);
}

static double us_per_token(const bench_row *row, double seconds)
{
    return seconds / (double)row->n_tokens * 1e6;
}

static void find_range(plot *p, const bench_result *r)
{
    size_t i;
    int s;
    p->x_min = p->y_min = 1e9;
    p->x_max = p->y_max = -1e9;
    for (i = 0; i < r->n_rows; i++) {
        const bench_row *row = &r->rows[i];
        double x = log10((double)row->n_tokens);
        if (x < p->x_min) p->x_min = x;
        if (x > p->x_max) p->x_max = x;
        for (s = 0; s < BENCH_N_PATHS; s++) {
            double low, high;
            if (!row->cells[s].measured) continue;
            low = log10(us_per_token(row, fmin(row->cells[s].p50, row->cells[s].roofline)));
            high = log10(us_per_token(row, fmax(row->cells[s].p50, row->cells[s].roofline)));
            if (low < p->y_min) p->y_min = low;
            if (high > p->y_max) p->y_max = high;
        }
    }
    p->y_min -= 0.12;
    p->y_max += 0.12;
    if (p->x_max - p->x_min < 0.3) {
        p->x_min -= 0.15;
        p->x_max += 0.15;
    }
}

static void put_text(const plot *p, double x, double y, const char *anchor, const char *style,
                     const char *text)
{
    const char *c;
    fprintf(p->f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" %s>", x, y, anchor, style);
    for (c = text; *c; c++) {
        if (*c == '<' || *c == '>' || *c == '&')
            fprintf(p->f, "&#%d;", *c);
        else
            fputc((unsigned char)*c < 0x20 || (unsigned char)*c > 0x7e ? '?' : *c, p->f);
    }
    fputs("</text>\n", p->f);
}

static void draw_axes(const plot *p, const bench_result *r)
{
    static const int steps[] = {1, 2, 5};
    double right = PLOT_WIDTH - RIGHT, bottom = PLOT_HEIGHT - BOTTOM, last_x = -100;
    char text[64];
    size_t i, k;
    int decade;
    for (decade = (int)floor(p->y_min); decade <= (int)ceil(p->y_max); decade++) {
        for (k = 0; k < 3; k++) {
            double us = steps[k] * pow(10, decade), y;
            if (log10(us) < p->y_min || log10(us) > p->y_max) continue;
            y = y_at(p, us);
            fprintf(p->f, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\" "
                    "stroke-width=\"%s\"/>\n", LEFT, y, right, y, k ? "0.5" : "1");
            snprintf(text, sizeof text, "%.6g", us);
            put_text(p, LEFT - 8, y + 4, "end", "fill=\"#444\"", text);
        }
    }
    for (i = 0; i < r->n_rows; i++) {
        const bench_row *row = &r->rows[p->order[i]];
        double x = x_at(p, (double)row->n_tokens);
        fprintf(p->f, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#eee\"/>\n",
                x, TOP, x, bottom);
        if (x - last_x < 26) continue;
        last_x = x;
        snprintf(text, sizeof text, "%" PRIu64, row->n_tokens);
        put_text(p, x, bottom + 18, "middle", "fill=\"#444\"", text);
    }
    fprintf(p->f, "<path d=\"M%.1f %.1fV%.1fH%.1f\" fill=\"none\" stroke=\"#888\"/>\n", LEFT, TOP,
            bottom, right);
    put_text(p, (LEFT + right) / 2, bottom + 44, "middle", "fill=\"#222\"", "positions in a call");
    fprintf(p->f, "<text transform=\"translate(22 %.1f) rotate(-90)\" text-anchor=\"middle\" "
            "fill=\"#222\">microseconds per position (p50)</text>\n", (TOP + bottom) / 2);
}

/* One line over all rows; stage's time or its roofline. Returns the y of its right end. */
static double draw_line(const plot *p, const bench_result *r, int stage, int roofline)
{
    double y = 0;
    size_t i, n = 0;
    fprintf(p->f, "<path fill=\"none\" stroke=\"%s\" stroke-width=\"%s\"%s d=\"",
            roofline ? "#222" : colours[stage], roofline ? "1.5" : "2.5",
            roofline ? " stroke-dasharray=\"6 4\"" : "");
    for (i = 0; i < r->n_rows; i++) {
        const bench_row *row = &r->rows[p->order[i]];
        const bench_cell *c = &row->cells[stage];
        if (!c->measured) continue;
        y = y_at(p, us_per_token(row, roofline ? c->roofline : c->p50));
        fprintf(p->f, "%c%.1f %.1f", n++ ? 'L' : 'M', x_at(p, (double)row->n_tokens), y);
    }
    fputs("\"/>\n", p->f);
    for (i = 0; !roofline && i < r->n_rows; i++) {
        const bench_row *row = &r->rows[p->order[i]];
        const bench_cell *c = &row->cells[stage];
        if (c->measured)
            fprintf(p->f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" fill=\"%s\"/>\n",
                    x_at(p, (double)row->n_tokens), y_at(p, us_per_token(row, c->p50)),
                    colours[stage]);
    }
    return y;
}

typedef struct label {
    double y;
    const char *text;
    const char *colour;
} label;

static int compare_labels(const void *a, const void *b)
{
    double x = ((const label *)a)->y, y = ((const label *)b)->y;
    return (x > y) - (x < y);
}

/* Names stand at the right ends of their lines, pushed apart where they would overlap. */
static void draw_lines(const plot *p, const bench_result *r)
{
    label labels[BENCH_N_PATHS + 1];
    size_t n = 0, i;
    int s, first = -1;
    for (s = BENCH_N_PATHS - 1; s >= 0; s--) {
        if (!r->stages[s]) continue;
        first = s;
        labels[n].y = draw_line(p, r, s, 0);
        labels[n].text = bench_stage_names[s];
        labels[n++].colour = colours[s];
    }
    if (first >= 0) {
        labels[n].y = draw_line(p, r, first, 1);
        labels[n].text = first == DSPARK_PATH_FULL ? "roofline (full)" : "roofline";
        labels[n++].colour = "#222";
    }
    qsort(labels, n, sizeof *labels, compare_labels);
    for (i = 1; i < n; i++)
        if (labels[i].y < labels[i - 1].y + 17) labels[i].y = labels[i - 1].y + 17;
    for (i = 0; i < n; i++) {
        char style[64];
        snprintf(style, sizeof style, "fill=\"%s\" font-weight=\"600\"", labels[i].colour);
        put_text(p, PLOT_WIDTH - RIGHT + 12, labels[i].y + 4, "start", style, labels[i].text);
    }
}

static void draw(const plot *p, const bench_result *r)
{
    char text[256];
    fprintf(p->f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" "
            "width=\"%.0f\" height=\"%.0f\" font-family=\"Helvetica, Arial, sans-serif\" "
            "font-size=\"13\">\n", PLOT_WIDTH, PLOT_HEIGHT, PLOT_WIDTH, PLOT_HEIGHT);
    fputs("<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n", p->f);
    put_text(p, LEFT, 30, "start", "font-size=\"17\" font-weight=\"600\" fill=\"#111\"",
             "States to every layer's cache: time per position");
    snprintf(text, sizeof text, "%.60s, %s, %u thread%s; compute %.0f GFLOP/s, read %.1f GB/s",
             r->cpu, r->isa, r->n_threads, r->n_threads == 1 ? "" : "s",
             bench_limit(r->compute_gflops), bench_limit(r->read_gbs));
    put_text(p, LEFT, 52, "start", "fill=\"#555\"", text);
    draw_axes(p, r);
    draw_lines(p, r);
    fputs("</svg>\n", p->f);
}

int bench_write_svg(const bench_result *r, const char *path)
{
    plot p = {0};
    out_file file;
    size_t i, k;
    int code;
    p.order = malloc((r->n_rows + 1) * sizeof *p.order);
    if (!p.order) return out_error(EXIT_INTERNAL, "out of memory");
    for (i = 0; i < r->n_rows; i++) { /* few rows: insertion keeps it plain */
        for (k = i; k && r->rows[p.order[k - 1]].n_tokens > r->rows[i].n_tokens; k--)
            p.order[k] = p.order[k - 1];
        p.order[k] = i;
    }
    code = out_file_open(&file, path);
    if (code == EXIT_OK) {
        p.f = file.stream;
        find_range(&p, r);
        draw(&p, r);
        code = out_file_commit(&file);
    }
    free(p.order);
    return code;
}
