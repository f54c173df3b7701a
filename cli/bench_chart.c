/* See bench_chart.h. */
#include "bench_chart.h"

#include <math.h>
#include <string.h>

typedef struct box {
    double x, y, w, h;             /* of the drawing area */
    double x0, x1, y0, y1;         /* what it shows: values, or logarithms */
    const chart_panel *p;
    FILE *f;
} box;

/* ---- building ---- */

chart_series *chart_find_series(chart_panel *p, const char *name)
{
    size_t i;
    for (i = 0; i < p->n_series; i++)
        if (strcmp(p->series[i].name, name) == 0) return &p->series[i];
    if (p->n_series == CHART_MAX_SERIES) return NULL;
    snprintf(p->series[p->n_series].name, sizeof p->series[0].name, "%s", name);
    return &p->series[p->n_series++];
}

void chart_add_point(chart_series *s, double x, double y, double limit, int hollow)
{
    size_t i;
    if (!s || s->n == CHART_MAX_POINTS) return;
    for (i = s->n; i && s->x[i - 1] > x; i--) {
        s->x[i] = s->x[i - 1];
        s->y[i] = s->y[i - 1];
        s->limit[i] = s->limit[i - 1];
        s->hollow[i] = s->hollow[i - 1];
    }
    s->x[i] = x;
    s->y[i] = y;
    s->limit[i] = limit;
    s->hollow[i] = hollow != 0;
    s->n++;
}

void chart_add_bar(chart_panel *p, const char *name, const char *note, double value, double limit, int colour)
{
    chart_bar *b = &p->bars[p->n_bars];
    if (p->n_bars == CHART_MAX_BARS) return;
    p->n_bars++;
    snprintf(b->name, sizeof b->name, "%s", name);
    snprintf(b->note, sizeof b->note, "%s", note);
    b->value = value;
    b->limit = limit;
    b->colour = colour;
}

/* ---- text ---- */

static void put_escaped(FILE *f, const char *c)
{
    for (; *c; c++) {
        if (*c == '<' || *c == '>' || *c == '&')
            fprintf(f, "&#%d;", *c);
        else
            fputc((unsigned char)*c < 0x20 || (unsigned char)*c > 0x7e ? '?' : *c, f);
    }
}

static void put_text(FILE *f, double x, double y, const char *anchor, const char *class_, const char *text)
{
    fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" class=\"%s\">", x, y, anchor, class_);
    put_escaped(f, text);
    fputs("</text>\n", f);
}

static void put_line(FILE *f, double x1, double y1, double x2, double y2, const char *class_)
{
    fprintf(f, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" class=\"%s\"/>\n", x1, y1, x2, y2, class_);
}

/* "512", "4k", "1M" where that is exact, else four digits. */
static const char *short_number(char buf[32], double v)
{
    if (v >= 1048576 && fmod(v, 1048576) == 0)
        snprintf(buf, 32, "%.0fM", v / 1048576);
    else if (v >= 1024 && fmod(v, 1024) == 0)
        snprintf(buf, 32, "%.0fk", v / 1024);
    else
        snprintf(buf, 32, "%.4g", v);
    return buf;
}

/* ---- axes ---- */

static double x_at(const box *b, double x)
{
    double v = b->p->log_x ? log10(x) : x;
    return b->x + (v - b->x0) / (b->x1 - b->x0) * b->w;
}

static double y_at(const box *b, double y)
{
    double v = b->p->log_y ? log10(y) : y;
    return b->y + b->h - (v - b->y0) / (b->y1 - b->y0) * b->h;
}

static void widen(double *low, double *high, double v, int logarithmic)
{
    if (!(v > 0) && logarithmic) return;
    if (logarithmic) v = log10(v);
    if (v < *low) *low = v;
    if (v > *high) *high = v;
}

static void find_range(box *b)
{
    const chart_panel *p = b->p;
    size_t s, i;
    b->x0 = b->y0 = 1e30;
    b->x1 = b->y1 = -1e30;
    for (s = 0; s < p->n_series; s++) {
        for (i = 0; i < p->series[s].n; i++) {
            widen(&b->x0, &b->x1, p->series[s].x[i], p->log_x);
            widen(&b->y0, &b->y1, p->series[s].y[i], p->log_y);
            if (p->series[s].limit[i] > 0) widen(&b->y0, &b->y1, p->series[s].limit[i], p->log_y);
        }
    }
    if (p->rule > 0) widen(&b->y0, &b->y1, p->rule, p->log_y);
    if (!(b->x1 >= b->x0)) b->x0 = b->x1 = 0;
    if (!(b->y1 >= b->y0)) b->y0 = b->y1 = p->log_y ? 0 : 1;
    if (p->log_y) {
        b->y0 -= 0.1;
        b->y1 += 0.1;
    } else {
        b->y0 = 0;
        b->y1 *= 1.08;
        if (!(b->y1 > 0)) b->y1 = 1;
    }
    if (!p->log_x && b->x0 > 0) b->x0 = 0;
    if (b->x1 - b->x0 < 1e-9) {
        b->x0 -= 0.5;
        b->x1 += 0.5;
    }
}

/* Nearest of 1, 2, 5 times a power of ten. */
static double nice_step(double rough)
{
    double power = pow(10, floor(log10(rough)));
    double m = rough / power;
    return power * (m < 1.5 ? 1 : m < 3.5 ? 2 : m < 7.5 ? 5 : 10);
}

static void draw_y_tick(const box *b, double v)
{
    char text[32];
    double y = y_at(b, v);
    if (y < b->y - 0.5 || y > b->y + b->h + 0.5) return;
    put_line(b->f, b->x, y, b->x + b->w, y, "g");
    snprintf(text, sizeof text, "%.4g", v);
    put_text(b->f, b->x - 7, y + 4, "end", "t", text);
}

static void draw_y_axis(const box *b)
{
    static const int steps[] = {1, 2, 5};
    double v, step;
    int decade;
    size_t k;
    if (b->p->log_y) {
        for (decade = (int)floor(b->y0); decade <= (int)ceil(b->y1); decade++)
            for (k = 0; k < 3; k++)
                if (k == 0 || b->y1 - b->y0 < 3.2) draw_y_tick(b, steps[k] * pow(10, decade));
    } else {
        step = nice_step((b->y1 - b->y0) / 5);
        for (v = 0; v <= b->y1; v += step) draw_y_tick(b, v);
    }
}

/* Marks stand where there are points. */
static void draw_x_axis(const box *b)
{
    const chart_panel *p = b->p;
    double last = -100, x, v = -1e30, next;
    char text[32];
    size_t s, i;
    for (;;) { /* the points' x in ascending order, over all series */
        next = 1e30;
        for (s = 0; s < p->n_series; s++)
            for (i = 0; i < p->series[s].n; i++)
                if (p->series[s].x[i] > v && p->series[s].x[i] < next) next = p->series[s].x[i];
        if (next >= 1e30) break;
        v = next;
        x = x_at(b, v);
        put_line(b->f, x, b->y, x, b->y + b->h, "g");
        if (x - last < 30) continue;
        last = x;
        put_text(b->f, x, b->y + b->h + 18, "middle", "t", short_number(text, v));
    }
    fprintf(b->f, "<path d=\"M%.1f %.1fV%.1fH%.1f\" class=\"a\"/>\n", b->x, b->y, b->y + b->h, b->x + b->w);
    put_text(b->f, b->x + b->w / 2, b->y + b->h + 40, "middle", "l", p->x_title);
    fprintf(b->f, "<text transform=\"translate(%.1f %.1f) rotate(-90)\" text-anchor=\"middle\" class=\"l\">",
            b->x - 56,
            b->y + b->h / 2);
    put_escaped(b->f, p->y_title);
    fputs("</text>\n", b->f);
}

/* ---- lines ---- */

/* kind: "f" of a full point, "o s" of a hollow one. */
static void put_point(FILE *f, double x, double y, const char *kind, size_t colour)
{
    fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%s\" class=\"%s%zu\"/>\n", x, y,
            *kind == 'o' ? "4.2" : "3.2", kind, colour);
}

static void draw_path(const box *b, const chart_series *s, size_t colour, int limits)
{
    size_t i, n = 0;
    fprintf(b->f, "<path class=\"%s s%zu\" d=\"", limits ? "d" : "p", colour);
    for (i = 0; i < s->n; i++) {
        const double y = limits ? s->limit[i] : s->y[i];
        if (!(y > 0)) continue;
        fprintf(b->f, "%c%.1f %.1f", n++ ? 'L' : 'M', x_at(b, s->x[i]), y_at(b, y));
    }
    fputs("\"/>\n", b->f);
    for (i = 0; !limits && i < s->n; i++)
        if (s->y[i] > 0)
            put_point(b->f, x_at(b, s->x[i]), y_at(b, s->y[i]), s->hollow[i] ? "o s" : "f", colour);
}

static int has_hollow(const chart_panel *p)
{
    size_t s, i;
    for (s = 0; s < p->n_series; s++)
        for (i = 0; i < p->series[s].n; i++)
            if (p->series[s].hollow[i]) return 1;
    return 0;
}

static int has_limits(const chart_panel *p)
{
    size_t s, i;
    for (s = 0; s < p->n_series; s++)
        for (i = 0; i < p->series[s].n; i++)
            if (p->series[s].limit[i] > 0) return 1;
    for (i = 0; i < p->n_bars; i++)
        if (p->bars[i].limit > 0) return 1;
    return p->rule > 0;
}

/* Names in one or more lines over the drawing area; returns the height. */
static double draw_legend(FILE *f, const chart_panel *p, double x, double y, double width)
{
    const double left = x, top = y;
    size_t i, n = p->n_bars ? 0 : p->n_series;
    for (i = 0; i <= n + 1; i++) {
        const char *name = i < n ? p->series[i].name : i == n ? p->limit_name : p->hollow_name;
        double length = 34 + 6.6 * (double)(name ? strlen(name) : 0);
        if (i >= n && (!name || !(i == n ? has_limits(p) : has_hollow(p)))) continue;
        if (i < n && n == 1 && !*name) continue;
        if (x > left && x + length > left + width) {
            x = left;
            y += 18;
        }
        if (i < n) {
            fprintf(f, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" class=\"p s%zu\"/>\n", x, y - 4,
                    x + 20, y - 4,
                    i % CHART_COLOURS);
            put_point(f, x + 10, y - 4, "f", i % CHART_COLOURS);
        } else if (i > n) {
            fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4.2\" class=\"o k\"/>\n", x + 10, y - 4);
        } else if (p->n_bars) {
            put_line(f, x + 10, y - 11, x + 10, y + 2, "m");
        } else {
            put_line(f, x, y - 4, x + 20, y - 4, "d k");
        }
        put_text(f, x + 26, y, "start", "l", name);
        x += length + 8;
    }
    return y - top;
}

static void draw_lines(box *b)
{
    const chart_panel *p = b->p;
    size_t s;
    find_range(b);
    draw_y_axis(b);
    draw_x_axis(b);
    if (p->rule > 0) put_line(b->f, b->x, y_at(b, p->rule), b->x + b->w, y_at(b, p->rule), "d k");
    for (s = 0; s < p->n_series; s++) draw_path(b, &p->series[s], s % CHART_COLOURS, 1);
    for (s = 0; s < p->n_series; s++) draw_path(b, &p->series[s], s % CHART_COLOURS, 0);
}

/* ---- bars ---- */

static void draw_bars(box *b)
{
    const chart_panel *p = b->p;
    const double room = 190, row = b->h / (double)p->n_bars, thick = row * 0.62 < 20 ? row * 0.62 : 20;
    double most = 0, v, step, width = b->w - room;
    char text[32];
    size_t i;
    for (i = 0; i < p->n_bars; i++) most = fmax(most, fmax(p->bars[i].value, p->bars[i].limit));
    if (!(most > 0)) most = 1;
    step = nice_step(most / 4);
    for (v = 0; v <= most * 1.001; v += step) {
        const double x = b->x + v / most * width;
        put_line(b->f, x, b->y, x, b->y + b->h, "g");
        snprintf(text, sizeof text, "%.4g", v);
        put_text(b->f, x, b->y + b->h + 18, "middle", "t", text);
    }
    for (i = 0; i < p->n_bars; i++) {
        const chart_bar *bar = &p->bars[i];
        const double y = b->y + ((double)i + 0.5) * row, end = bar->value / most * width;
        const double mark = bar->limit / most * width;
        put_text(b->f, b->x - 7, y + 4, "end", "l", bar->name);
        fprintf(b->f, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" class=\"f%d\"/>\n", b->x,
                y - thick / 2,
                fmax(end, 0.5), thick, bar->colour % CHART_COLOURS);
        if (bar->limit > 0) put_line(b->f, b->x + mark, y - row / 2 + 1, b->x + mark, y + row / 2 - 1, "m");
        put_text(b->f, b->x + fmax(end, mark) + 7, y + 4, "start", "t", bar->note);
    }
    put_line(b->f, b->x, b->y, b->x, b->y + b->h, "a");
    put_text(b->f, b->x + width / 2, b->y + b->h + 40, "middle", "l", p->x_title);
}

/* ---- the picture ---- */

static void put_style(FILE *f)
{
    /* Colours that also differ in lightness, for those who see hues otherwise. */
    static const char *const light[CHART_COLOURS] = {"#0b5fa5", "#c2571a", "#5f6b76", "#2f8f5b", "#8a4fb3",
                                                     "#b08800"};
    static const char *const dark[CHART_COLOURS] = {"#6cb6ff", "#ff9a62", "#a8b3bd", "#62d196", "#cfa3f2", "#e8c547"};
    int i;
    fputs("<style>text{font:13px Helvetica,Arial,sans-serif}.h{font-size:17px;font-weight:600}"
          ".b{font-size:14px;font-weight:600}.t{font-size:12px}.p{fill:none;stroke-width:2.3}"
          ".d{fill:none;stroke-width:1.5;stroke-dasharray:6 4}.a{fill:none;stroke:#888}"
          ".w{fill:#fff}.h,.b{fill:#111}.l{fill:#222}.t,.u{fill:#555}.g{stroke:#e6e6e6}.k,.m{stroke:#222}"
          ".m{stroke-width:2.5}.o{fill:#fff;stroke-width:2}", f);
    for (i = 0; i < CHART_COLOURS; i++) fprintf(f, ".s%d{stroke:%s}.f%d{fill:%s}", i, light[i], i, light[i]);
    fputs("@media (prefers-color-scheme:dark){.w{fill:#0d1117}.h,.b{fill:#f0f3f6}.l{fill:#dde3e9}.t,.u{fill:#aab4be}"
          ".g{stroke:#2b323b}.k,.m{stroke:#dde3e9}.o{fill:#0d1117}", f);
    for (i = 0; i < CHART_COLOURS; i++) fprintf(f, ".s%d{stroke:%s}.f%d{fill:%s}", i, dark[i], i, dark[i]);
    fputs("}</style>\n", f);
}

static double panel_height(const chart_panel *p)
{
    double bars = 24.0 * (double)p->n_bars;
    return p->n_bars ? bars + 150 : 400;
}

static void draw_panel(FILE *f, const chart_panel *p, double x, double y, double width, double height)
{
    const double left = p->n_bars ? 190 : 78;
    double legend;
    box b = {.p = p, .f = f};
    put_text(f, x + 16, y + 22, "start", "b", p->title);
    legend = draw_legend(f, p, x + 16, y + 46, width - 40);
    b.x = x + left;
    b.y = y + 62 + legend;
    b.w = width - left - 22;
    b.h = height - 62 - legend - 56;
    if (p->n_bars) draw_bars(&b);
    else draw_lines(&b);
}

void chart_write(FILE *f, const char *title, const char *subtitle, const chart_panel *panels, size_t n)
{
    const size_t columns = n > 1 ? 2 : 1;
    const double wide = columns == 1 ? 860 : 620, head = 66;
    double y = head, height = head, row;
    size_t i, k;
    for (i = 0; i < n; i += columns) {
        for (row = 0, k = i; k < n && k < i + columns; k++) row = fmax(row, panel_height(&panels[k]));
        height += row;
    }
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\">\n",
            wide * (double)columns, height, wide * (double)columns, height);
    put_style(f);
    fputs("<rect width=\"100%\" height=\"100%\" class=\"w\"/>\n", f);
    put_text(f, 16, 30, "start", "h", title);
    put_text(f, 16, 52, "start", "u", subtitle);
    for (i = 0; i < n; i += columns) {
        for (row = 0, k = i; k < n && k < i + columns; k++) row = fmax(row, panel_height(&panels[k]));
        for (k = i; k < n && k < i + columns; k++)
            draw_panel(f, &panels[k], wide * (double)(k - i), y, wide, panel_height(&panels[k]));
        y += row;
    }
    fputs("</svg>\n", f);
}
