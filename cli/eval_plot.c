/* dspark eval: the report as one HTML file with its drawings inside (SVG, no scripts, no fonts, nothing
 * from outside): acceptance by position, by depth of the context, how many drafts were accepted, and the
 * reliability of the confidence. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "eval.h"
#include "out.h"

#define W 460.0
#define H 300.0
#define LEFT 52.0
#define RIGHT 16.0
#define TOP 18.0
#define BOTTOM 46.0

#define BLUE "#0b5fa5"
#define RUST "#c2571a"

static void put_escaped(FILE *f, const char *text)
{
    char clean[512];
    const char *c;
    for (c = out_clean(clean, sizeof clean, text); *c; c++) {
        if (*c == '<') fputs("&lt;", f);
        else if (*c == '>') fputs("&gt;", f);
        else if (*c == '&') fputs("&amp;", f);
        else fputc(*c, f);
    }
}

static double x_at(double share)
{
    return LEFT + share * (W - LEFT - RIGHT);
}

static double y_at(double share)
{
    return H - BOTTOM - share * (H - TOP - BOTTOM);
}

static void label(FILE *f, double x, double y, const char *anchor, const char *colour, const char *text)
{
    fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" fill=\"%s\">%s</text>\n", x, y, anchor, colour,
            text);
}

/* A frame whose y axis runs from 0 to `top` in steps. */
static void begin_panel(FILE *f, const char *title, const char *x_title, double top, double step,
                        const char *format, double factor)
{
    double v;
    char text[32];
    fprintf(f, "<figure><figcaption>%s</figcaption>\n<svg viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
            "height=\"%.0f\" role=\"img\" aria-label=\"%s\">\n", title, W, H, W, H, title);
    for (v = 0; v <= top * 1.0001; v += step) {
        fprintf(f, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#e2e2e2\"/>\n", LEFT,
                y_at(v / top), W - RIGHT, y_at(v / top));
        snprintf(text, sizeof text, format, v * factor);
        label(f, LEFT - 6, y_at(v / top) + 4, "end", "#555", text);
    }
    label(f, (LEFT + W - RIGHT) / 2, H - 8, "middle", "#333", x_title);
}

static void end_panel(FILE *f)
{
    fputs("</svg></figure>\n", f);
}

static void bar(FILE *f, double x, double width, double share, const char *colour)
{
    fprintf(f, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"/>\n", x, y_at(share),
            width, y_at(0) - y_at(share), colour);
}

/* Bars: accepted; line: conditional. */
static void draw_positions(FILE *f, const eval_figures *g)
{
    double step = 1.0 / g->k;
    char text[32];
    uint32_t k;
    int started = 0;
    begin_panel(f, "Acceptance by position", "position in the block", 1, 0.2, "%.0f %%", 100);
    for (k = 0; k < g->k; k++) {
        bar(f, x_at((k + 0.2) * step), x_at(0.6 * step) - x_at(0), g->positions[k].accepted, BLUE);
        snprintf(text, sizeof text, "%u", k + 1);
        label(f, x_at((k + 0.5) * step), H - BOTTOM + 16, "middle", "#555", text);
    }
    fprintf(f, "<path fill=\"none\" stroke=\"" RUST "\" stroke-width=\"2.5\" d=\"");
    for (k = 0; k < g->k; k++)
        if (!isnan(g->positions[k].conditional))
            fprintf(f, "%c%.1f %.1f", started++ ? 'L' : 'M', x_at((k + 0.5) * step),
                    y_at(g->positions[k].conditional));
    fputs("\"/>\n", f);
    for (k = 0; k < g->k; k++)
        if (!isnan(g->positions[k].conditional))
            fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"" RUST "\"/>\n",
                    x_at((k + 0.5) * step), y_at(g->positions[k].conditional));
    end_panel(f);
    fprintf(f, "<p class=\"key\"><b style=\"color:" BLUE "\">bars</b> accepted (all before it too); "
            "<b style=\"color:" RUST "\">line</b> conditional on all before it</p>\n");
}

static void draw_histogram(FILE *f, const eval_figures *g)
{
    double step = 1.0 / (g->k + 1), top = 0;
    char text[32];
    uint32_t k;
    for (k = 0; k <= g->k; k++)
        if ((double)g->histogram[k] / (double)g->n_anchors > top)
            top = (double)g->histogram[k] / (double)g->n_anchors;
    top = ceil(top * 10) / 10;
    begin_panel(f, "Drafts accepted", "accepted drafts of a block", top, top / 5, "%.0f %%", 100);
    for (k = 0; k <= g->k; k++) {
        bar(f, x_at((k + 0.15) * step), x_at(0.7 * step) - x_at(0),
            (double)g->histogram[k] / (double)g->n_anchors / top, BLUE);
        snprintf(text, sizeof text, "%u", k);
        label(f, x_at((k + 0.5) * step), H - BOTTOM + 16, "middle", "#555", text);
    }
    end_panel(f);
    fputs("<p class=\"key\">share of the anchors</p>\n", f);
}

static void draw_depths(FILE *f, const eval_figures *g)
{
    double step = 1.0 / (double)g->n_depths, top = g->k + 1;
    char text[48], high[32];
    size_t i;
    begin_panel(f, "Acceptance length by depth of the context", "context up to (positions)", top,
                top > 10 ? ceil(top / 8) : 1, "%.0f", 1);
    for (i = 0; i < g->n_depths; i++) {
        double share = g->depths[i].length / top;
        bar(f, x_at(((double)i + 0.2) * step), x_at(0.6 * step) - x_at(0), share, BLUE);
        snprintf(text, sizeof text, "%.2f", g->depths[i].length);
        label(f, x_at(((double)i + 0.5) * step), y_at(share) - 5, "middle", "#333", text);
        label(f, x_at(((double)i + 0.5) * step), H - BOTTOM + 16, "middle", "#555",
              out_count(high, g->depths[i].high - 1));
    }
    end_panel(f);
    fputs("<p class=\"key\">drafts accepted + the target's own token</p>\n", f);
}

static void draw_reliability(FILE *f, const eval_figures *g)
{
    uint64_t most = 1;
    char text[32];
    size_t i;
    begin_panel(f, "Reliability of the confidence", "confidence", 1, 0.2, "%.0f %%", 100);
    for (i = 0; i <= 5; i++) {
        snprintf(text, sizeof text, "%.1f", (double)i / 5);
        label(f, x_at((double)i / 5), H - BOTTOM + 16, "middle", "#555", text);
    }
    for (i = 0; i < EVAL_RELIABILITY_BINS; i++)
        if (g->reliability[i].n > most) most = g->reliability[i].n;
    for (i = 0; i < EVAL_RELIABILITY_BINS; i++) /* how many fell here: a faint bar */
        bar(f, x_at(((double)i + 0.1) / EVAL_RELIABILITY_BINS),
            x_at(0.8 / EVAL_RELIABILITY_BINS) - x_at(0),
            0.3 * (double)g->reliability[i].n / (double)most, "#dce8f2");
    fprintf(f, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#888\" "
            "stroke-dasharray=\"6 4\"/>\n", x_at(0), y_at(0), x_at(1), y_at(1));
    for (i = 0; i < EVAL_RELIABILITY_BINS; i++)
        if (g->reliability[i].n)
            fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%.1f\" fill=\"" RUST "\"/>\n",
                    x_at(g->reliability[i].confidence), y_at(g->reliability[i].accepted),
                    2.5 + 3.5 * sqrt((double)g->reliability[i].n / (double)most));
    end_panel(f);
    fprintf(f, "<p class=\"key\"><b style=\"color:" RUST "\">dots</b> share accepted at that confidence; on the "
            "dashed line it is honest; faint bars: how many. ECE %.3f, Brier %.3f, AUC %.3f</p>\n", g->ece,
            g->brier, g->auc);
}

static void put_summary(FILE *f, const eval_report *r)
{
    const eval_figures *g = r->figures;
    double block = eval_block_seconds(r);
    char a[32], b[32];
    fprintf(f, "<table>\n<tr><th>Acceptance length</th><td>%.3f</td><td>drafts accepted + the target's own "
            "token, of %u; %s drafts against the text</td></tr>\n", g->accepted + 1, g->k + 1,
            r->sampled ? "sampled" : "greedy");
    fprintf(f, "<tr><th>Accepted drafts</th><td>%.3f</td><td>without that token, of %u; standard error "
            "%.3f</td></tr>\n", g->accepted, g->k, g->accepted_stderr);
    if (!isnan(g->expected_sampled))
        fprintf(f, "<tr><th>Analytic length</th><td>%.3f</td><td>when draft and target sample at temperature "
                "%g; greedy drafts: %.3f</td></tr>\n", g->expected_sampled + 1, r->temperature,
                g->expected_greedy + 1);
    if (block > 0 && g->accepted > 0)
        fprintf(f, "<tr><th>Break-even</th><td>%s</td><td>a block took %s; drafting pays when a target step takes "
                "longer than this</td></tr>\n", out_seconds(a, block / g->accepted), out_seconds(b, block));
    fputs("</table>\n", f);
}

static void put_page(FILE *f, const eval_report *r)
{
    char a[32];
    fputs("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>dspark eval</title>\n"
          "<style>body{font:15px/1.45 Helvetica,Arial,sans-serif;color:#1a1a1a;max-width:1000px;margin:2em "
          "auto;padding:0 1em}svg text{font-size:12px}figure{margin:0}figcaption{font-weight:600;margin:0 0 "
          ".2em}.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(460px,1fr));gap:1.6em}"
          ".key{color:#555;font-size:13px;margin:.2em 0}table{border-collapse:collapse;margin:1em 0}th{text-"
          "align:left;font-weight:600}th,td{padding:.25em 1em .25em 0;vertical-align:top}td:nth-child(2){"
          "font-weight:600;white-space:nowrap}</style></head>\n<body><h1>How many drafts does the target "
          "accept?</h1>\n<p>", f);
    put_escaped(f, r->checkpoint);
    fputs(" on ", f);
    put_escaped(f, r->data);
    fprintf(f, ": %s anchors", out_count(a, r->figures->n_anchors));
    fprintf(f, " in %s dumps; fingerprint <code>%s</code></p>\n", out_count(a, r->figures->n_dumps),
            r->fingerprint);
    put_summary(f, r);
    fputs("<div class=\"grid\">\n<div>", f);
    draw_positions(f, r->figures);
    fputs("</div>\n<div>", f);
    draw_histogram(f, r->figures);
    fputs("</div>\n<div>", f);
    draw_depths(f, r->figures);
    fputs("</div>\n", f);
    if (r->figures->has_confidence) {
        fputs("<div>", f);
        draw_reliability(f, r->figures);
        fputs("</div>\n", f);
    }
    fputs("</div></body></html>\n", f);
}

int eval_write_html(const eval_report *r, const char *path)
{
    out_file file;
    int code = out_file_open(&file, path);
    if (code != EXIT_OK) return code;
    put_page(file.stream, r);
    return out_file_commit(&file);
}
