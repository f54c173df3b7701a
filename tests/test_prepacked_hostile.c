/* Prepacked files as an enemy or a broken disk makes them: every flipped byte of head and table, cuts at
 * every kind of place, and heads and tables that are well signed and lie. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "model/model.h"
#include "support/drafting.h"
#include "support/fixture.h"
#include "support/tmpdir.h"

static dspark_error err;

/* A good file of a context, in memory, and where spoilt ones are put. */
typedef struct good {
    fixture f;
    unsigned char *bytes, *work;
    size_t n;
    char path[600];
} good;

static void read_file(good *g)
{
    struct stat info;
    int fd = open(g->path, O_RDONLY);
    assert_int_equal(fstat(fd, &info), 0);
    g->n = (size_t)info.st_size;
    g->bytes = malloc(g->n);
    g->work = malloc(g->n + 64);
    assert_true(g->bytes && g->work);
    assert_int_equal(read(fd, g->bytes, g->n), g->n);
    memcpy(g->work, g->bytes, g->n);
    close(fd);
}

static int setup(void **state)
{
    good *g = calloc(1, sizeof *g);
    dspark_model_opts o;
    assert_non_null(g);
    open_fixture(&g->f, NULL, 0);
    snprintf(g->path, sizeof g->path, "%s/packed", tmpdir_make());
    dspark_model_opts_init(&o);
    check(dspark_prepack(g->f.dir, g->path, &o, &err), DSPARK_OK, &err);
    read_file(g);
    *state = g;
    return 0;
}

static int teardown(void **state)
{
    good *g = *state;
    close_fixture(&g->f);
    free(g->bytes);
    free(g->work);
    free(g);
    return 0;
}

static dspark_status open_with(const good *g, int verify)
{
    dspark_model *m = NULL;
    dspark_model_opts o;
    dspark_model_opts_init(&o);
    o.prepacked = g->path;
    o.prepacked_verify = verify;
    dspark_status st = dspark_model_open(&m, g->f.dir, &o, &err);
    assert_true((st == DSPARK_OK) == (m != NULL));
    dspark_model_close(m);
    return st;
}

static void refused(const good *g, dspark_status want, const char *says)
{
    check(open_with(g, 0), want, &err);
    assert_non_null(strstr(err.where, "packed"));
    if (!strstr(err.message, says)) fail_msg("expected \"%s\" in \"%s\"", says, err.message);
}

/* One byte in place, so that no file is written whole a thousand times. */
static void put_byte(const good *g, size_t at, unsigned char byte)
{
    int fd = open(g->path, O_WRONLY);
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

static void test_flipped_bytes(void **state)
{
    good *g = *state;
    dspark__prepacked_head head;
    dspark__section section;
    tmpdir_write(g->path, g->bytes, g->n);
    check(dspark__prepacked_decode(&head, g->bytes, "good", &err), DSPARK_OK, &err);
    for (size_t at = 0; at < g->n; at++) {
        const int signed_part = at < DSPARK__HEAD_BYTES || at >= head.table_offset;
        const size_t step = at < 300 || (at >= DSPARK__HEAD_BYTES - 40 && signed_part) ? 1 : 37;
        put_byte(g, at, g->bytes[at] ^ (unsigned char)(1u << (at % 8)));
        if (signed_part) {
            dspark_status st = open_with(g, 0);
            assert_true(st == DSPARK_EFORMAT || st == DSPARK_EUNSUPPORTED);
        }
        put_byte(g, at, g->bytes[at]);
        at += step - 1;
    }
    /* What sections hold is looked at when asked for. */
    for (uint32_t i = 0; i < head.n_sections; i++) {
        check(dspark__section_decode(&section, g->bytes + head.table_offset + i * DSPARK__SECTION_BYTES, i,
                                     "good", &err),
              DSPARK_OK, &err);
        const size_t places[] = {0, (size_t)section.bytes / 2, (size_t)section.bytes - 1};
        for (size_t p = 0; p < 3; p++) {
            size_t at = (size_t)section.offset + places[p];
            put_byte(g, at, g->bytes[at] ^ 0x10u);
            check(open_with(g, 0), DSPARK_OK, &err);
            check(open_with(g, 1), DSPARK_EFORMAT, &err);
            assert_non_null(strstr(err.message, "is damaged"));
            put_byte(g, at, g->bytes[at]);
        }
    }
    check(open_with(g, 1), DSPARK_OK, &err);
}

static void test_lengths(void **state)
{
    good *g = *state;
    const size_t lengths[] = {0, 1, 8, 4095, 4096, 4097, g->n / 2, g->n - 768, g->n - 64, g->n - 1, g->n + 1,
                              g->n + 64};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        memset(g->work + g->n, 0, 64);
        tmpdir_write(g->path, g->work, lengths[i]);
        refused(g, DSPARK_EFORMAT, "bytes");
    }
    unlink(g->path);
    refused(g, DSPARK_EIO, "cannot be opened");
    assert_int_equal(mkfifo(g->path, 0600), 0);
    refused(g, DSPARK_EIO, "regular file");
    unlink(g->path);
    assert_int_equal(mkdir(g->path, 0700), 0);
    refused(g, DSPARK_EIO, "");
    rmdir(g->path);
    tmpdir_write(g->path, "{\"not\": 1}", 10);
    refused(g, DSPARK_EFORMAT, "not a prepacked file");
}

/* ---- well signed lies ---- */

typedef struct lie {
    good *g;
    dspark__prepacked_head head;
    dspark__section sections[16];
} lie;

static lie begin(good *g)
{
    lie l = {.g = g};
    memcpy(g->work, g->bytes, g->n);
    check(dspark__prepacked_decode(&l.head, g->bytes, "good", &err), DSPARK_OK, &err);
    assert_true(l.head.n_sections > 3 && l.head.n_sections <= 16);
    for (uint32_t i = 0; i < l.head.n_sections; i++)
        check(dspark__section_decode(&l.sections[i],
                                     g->bytes + l.head.table_offset + i * DSPARK__SECTION_BYTES, i, "good",
                                     &err),
              DSPARK_OK, &err);
    return l;
}

static void sign_head(lie *l)
{
    dspark__prepacked_encode(&l->head, l->g->work);
    tmpdir_write(l->g->path, l->g->work, l->g->n);
}

static void sign(lie *l)
{
    unsigned char *table = l->g->work + l->head.table_offset;
    dspark__digest d;
    for (uint32_t i = 0; i < l->head.n_sections; i++)
        dspark__section_encode(&l->sections[i], table + i * DSPARK__SECTION_BYTES);
    dspark__digest_init(&d);
    dspark__digest_update(&d, table, (size_t)l->head.n_sections * DSPARK__SECTION_BYTES);
    dspark__digest_hex(&d, l->head.table);
    sign_head(l);
}

static void test_versions(void **state)
{
    good *g = *state;
    static const struct { size_t at; const char *says; } words[] = {
        {12, "format version 77"}, {16, "panel layout 77"}, {20, "panels of 77"}};
    for (size_t i = 0; i < 3; i++) {
        memcpy(g->work, g->bytes, g->n);
        g->work[words[i].at] = 77;
        tmpdir_write(g->path, g->work, g->n);
        refused(g, DSPARK_EUNSUPPORTED, words[i].says);
        assert_non_null(strstr(err.message, "pack the checkpoint again"));
    }
    memcpy(g->work, g->bytes, g->n);
    for (size_t i = 0; i < 4; i++) g->work[8 + i] = g->bytes[11 - i];
    tmpdir_write(g->path, g->work, g->n);
    refused(g, DSPARK_EUNSUPPORTED, "other byte order");
}

static void test_lying_heads(void **state)
{
    good *g = *state;
    lie l = begin(g);
    l.head.file_bytes++;
    sign_head(&l);
    refused(g, DSPARK_EFORMAT, "it was cut");
    l = begin(g);
    l.head.file_bytes -= 64;
    sign_head(&l);
    refused(g, DSPARK_EFORMAT, "something follows it");
    const uint64_t offsets[] = {0, 64, g->n, g->n + 64, UINT64_MAX, UINT64_MAX - 767, g->n - 768};
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        l = begin(g);
        l.head.table_offset = offsets[i];
        sign_head(&l);
        refused(g, DSPARK_EFORMAT, "does not end");
    }
    const uint32_t counts[] = {0, l.head.n_sections - 1, l.head.n_sections + 1, UINT32_MAX};
    for (size_t i = 0; i < 4; i++) {
        l = begin(g);
        l.head.n_sections = counts[i];
        sign_head(&l);
        refused(g, DSPARK_EFORMAT, "does not end");
    }
    const uint32_t parts[] = {0, 2, 4, 5, 6, 8, 9, 15, 0x80000001u, UINT32_MAX};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        uint32_t found = 0;
        l = begin(g);
        l.head.parts = parts[i];
        sign_head(&l);
        refused(g, DSPARK_EFORMAT, "the head names parts");
        check(dspark_prepacked_parts(g->path, &found, &err), DSPARK_EFORMAT, &err);
        assert_string_equal(err.where, g->path);
    }
    l = begin(g);
    l.head.parts = 7; /* it holds the context's sections only, which is all that is asked for */
    sign_head(&l);
    check(open_with(g, 1), DSPARK_OK, &err);
    l = begin(g);
    l.head.config[3] ^= 1;
    sign_head(&l);
    refused(g, DSPARK_EMODEL, "config.json");
    l = begin(g);
    l.head.context[3] ^= 1; /* with the right identity this is believed, unless asked */
    l.head.identity[0] = 0;
    sign_head(&l);
    refused(g, DSPARK_EMODEL, "before it changed");
}

static void test_lying_tables(void **state)
{
    good *g = *state;
    lie l = begin(g);
    const uint64_t end = l.head.table_offset;
    const uint64_t offsets[] = {0, 64, 4095, l.sections[1].offset + 1, l.sections[0].offset, end, end - 64,
                                UINT64_MAX - 63, UINT64_MAX};
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        l = begin(g);
        l.sections[1].offset = offsets[i];
        sign(&l);
        refused(g, DSPARK_EFORMAT, "begins at byte");
    }
    const uint64_t sizes[] = {0, 1, l.sections[1].bytes + 64, UINT64_MAX};
    for (size_t i = 0; i < 4; i++) {
        l = begin(g);
        l.sections[1].bytes = sizes[i];
        sign(&l);
        refused(g, DSPARK_EFORMAT, "not those of its shape");
    }
    for (int what = 0; what < 5; what++) {
        l = begin(g);
        dspark__section *s = &l.sections[1], first = l.sections[0];
        switch (what) {
        case 0: s->shard++; break;
        case 1: snprintf(s->name, sizeof s->name, "o"); break;
        case 2: snprintf(s->scheme, sizeof s->scheme, "bf17"); break;
        case 3: s->rows++; break; /* the panel has room */
        default:
            l.sections[0] = l.sections[1]; /* in the wrong order */
            l.sections[1] = first;
            l.sections[1].offset = l.sections[0].offset;
            l.sections[0].offset = first.offset;
        }
        sign(&l);
        check(open_with(g, 0), DSPARK_EFORMAT, &err);
    }
}

static void test_lying_packings(void **state)
{
    good *g = *state;
    for (int what = 0; what < 13; what++) {
        lie l = begin(g);
        dspark__packing *p = &l.sections[1].packing;
        if (what > 4) { /* as if of codes */
            *p = (dspark__packing){.bits = 8, .format = {.bits = 8}};
        }
        switch (what) {
        case 0: p->bits = 15; break;
        case 1: p->group = 8; break;
        case 2: p->row_scale = 1; break;
        case 3: p->permuted = 1; break;
        case 4: p->format.bits = 4; break;
        case 5: p->format.bits = 4; break;
        case 6: p->format.scale = (dspark__code_scale)4; break;
        case 7: p->format.scale = DSPARK__CODE_E4M3; break; /* of no block */
        case 8:
            p->format.scale = DSPARK__CODE_E4M3;
            p->format.block = 12;
            break;
        case 9: p->group = 12; break;
        case 11: p->narrow = 1; break;
        case 12: *p = (dspark__packing){.bits = 16, .narrow = 1}; break; /* which this linear is not */
        default: p->format.block = 16; break;
        }
        if (what != 6 && what != 7) /* no size can be told of those */
            l.sections[1].bytes = dspark__packing_bytes(p, l.sections[1].rows, l.sections[1].k);
        sign(&l);
        check(open_with(g, 0), DSPARK_EFORMAT, &err);
        assert_non_null(strstr(err.message, "section 1"));
    }
}

/* ---- bounds of the Markov bias ---- */

/* A good file of all parts. */
typedef struct whole {
    drafting d;
    good g;
    uint32_t bound; /* the section of bounds */
} whole;

static dspark_model_opts whole_opts(const whole *w, dspark_host_matrix *head)
{
    dspark_model_opts o;
    *head = (dspark_host_matrix){w->d.lm_head, w->d.vocab, w->d.h, 0};
    dspark_model_opts_init(&o);
    o.parts = DSPARK_PART_BLOCK;
    o.lm_head = head;
    return o;
}

/* The good file of all parts. */
static void make_whole(whole *w)
{
    dspark_host_matrix lm_head;
    drafting_open(&w->d, NULL, 0);
    snprintf(w->g.path, sizeof w->g.path, "%s.packed", w->d.dir);
    dspark_model_opts o = whole_opts(w, &lm_head);
    check(dspark_prepack(w->d.dir, w->g.path, &o, &err), DSPARK_OK, &err);
    read_file(&w->g);
}

static void free_whole(whole *w)
{
    drafting_close(&w->d);
    free(w->g.bytes);
    free(w->g.work);
}

static dspark_status open_whole(const whole *w, dspark_model **m)
{
    dspark_host_matrix head;
    dspark_model_opts o = whole_opts(w, &head);
    o.prepacked = w->g.path;
    return dspark_model_open(m, w->d.dir, &o, &err);
}

static void refuse_whole(const whole *w, const char *says)
{
    dspark_model *m = NULL;
    check(open_whole(w, &m), DSPARK_EFORMAT, &err);
    assert_null(m);
    if (!strstr(err.message, says)) fail_msg("expected \"%s\" in \"%s\"", says, err.message);
}

/* Head and entries of the file in w->g.work, which are not looked at. */
static dspark__section section_of(const whole *w, uint32_t i, dspark__prepacked_head *head)
{
    dspark__section s;
    check(dspark__prepacked_decode(head, w->g.bytes, "good", &err), DSPARK_OK, &err);
    assert_true(i < head->n_sections);
    check(dspark__section_decode(&s, w->g.bytes + head->table_offset + i * DSPARK__SECTION_BYTES, i, "good", &err),
          DSPARK_OK, &err);
    return s;
}

static void sign_whole(whole *w, dspark__prepacked_head *head, size_t n)
{
    dspark__digest d;
    dspark__digest_init(&d);
    dspark__digest_update(&d, w->g.work + head->table_offset, (size_t)head->n_sections * DSPARK__SECTION_BYTES);
    dspark__digest_hex(&d, head->table);
    dspark__prepacked_encode(head, w->g.work);
    tmpdir_write(w->g.path, w->g.work, n);
}

/* The file with another entry for section i, well signed. */
static void write_entry(whole *w, uint32_t i, const dspark__section *s)
{
    dspark__prepacked_head head;
    section_of(w, i, &head);
    memcpy(w->g.work, w->g.bytes, w->g.n);
    dspark__section_encode(s, w->g.work + head.table_offset + i * DSPARK__SECTION_BYTES);
    sign_whole(w, &head, w->g.n);
}

static void test_lying_bounds(void **state)
{
    whole w = {0};
    dspark__prepacked_head head;
    dspark_model *m = NULL;
    (void)state;
    make_whole(&w);
    while (strcmp(section_of(&w, w.bound, &head).scheme, DSPARK__SECTION_BOUND) != 0) w.bound++;
    const dspark__section good_bound = section_of(&w, w.bound, &head);
    assert_string_equal(good_bound.name, "markov_w2");
    /* What kernels must not meet, in the first panel and the last, in each of the three kinds. */
    static const uint16_t bad[] = {0x7f80, 0x7fc0, 0xffff, 0x8000, 0xbf80};
    const size_t stride = DSPARK__BOUND_HEAD + (good_bound.k + 7) / 8 * DSPARK__PANEL * 4;
    for (size_t i = 0; i < 15; i++) {
        const size_t panel = i % 2 ? good_bound.bytes / stride - 1 : 0;
        const size_t at = (size_t)good_bound.offset + panel * stride + (i / 5 * DSPARK__PANEL + i * 3) * 2;
        memcpy(w.g.work, w.g.bytes, w.g.n);
        memcpy(w.g.work + at, &bad[i % 5], 2);
        tmpdir_write(w.g.path, w.g.work, w.g.n);
        refuse_whole(&w, "no finite positive number");
    }
    for (int what = 0; what < 8; what++) {
        dspark__section s = good_bound;
        switch (what) {
        case 0: s.shard = 1; break;
        case 1: snprintf(s.name, sizeof s.name, "lm_head"); break;
        case 2: s.bytes -= 64; break;
        case 3: s.rows++; break; /* the panel has room */
        case 4: s.k += DSPARK__PANEL; break;
        case 5: snprintf(s.scheme, sizeof s.scheme, "bf16"); break;
        case 6: s.packing = (dspark__packing){.bits = 4, .format.bits = 4}; break; /* which have no bounds */
        default: s.packing = (dspark__packing){.bits = 8, .format.bits = 8}; break; /* not those of the matrix */
        }
        write_entry(&w, w.bound, &s);
        refuse_whole(&w, what == 2 || (what >= 4 && what < 7) ? "not those of its shape" : "expected bounds of markov_w2");
    }
    /* Bounds in the place of a weight. */
    dspark__section s = section_of(&w, w.bound - 1, &head);
    snprintf(s.scheme, sizeof s.scheme, DSPARK__SECTION_BOUND);
    s.bytes = dspark__markov_bound_bytes(&s.packing, s.rows, s.k);
    write_entry(&w, w.bound - 1, &s);
    refuse_whole(&w, "expected markov_w2, shard 0");
    /* None at all: they are made, as without a file. */
    section_of(&w, 0, &head);
    memcpy(w.g.work, w.g.bytes, w.g.n);
    unsigned char *entry = w.g.work + head.table_offset + w.bound * DSPARK__SECTION_BYTES;
    memmove(entry, entry + DSPARK__SECTION_BYTES, (head.n_sections - w.bound - 1) * DSPARK__SECTION_BYTES);
    head.n_sections--;
    head.file_bytes -= DSPARK__SECTION_BYTES;
    sign_whole(&w, &head, w.g.n - DSPARK__SECTION_BYTES);
    check(open_whole(&w, &m), DSPARK_OK, &err);
    assert_memory_equal(m->block.markov_bound.panels, w.g.bytes + good_bound.offset, good_bound.bytes);
    assert_non_null(m->block.markov_bound.memory);
    dspark_model_close(m);
    free_whole(&w);
}

/* Fewer parts than there are: the sections behind them would be looked at by nobody. */
static void test_lying_parts(void **state)
{
    whole w = {0};
    dspark__prepacked_head head;
    dspark_model_opts o;
    dspark_model *m = NULL;
    (void)state;
    make_whole(&w);
    section_of(&w, 0, &head);
    assert_int_equal(head.parts, 7);
    dspark_model_opts_init(&o);
    o.prepacked = w.g.path;
    for (uint32_t parts = 1; parts <= 3; parts += 2) {
        memcpy(w.g.work, w.g.bytes, w.g.n);
        head.parts = parts;
        sign_whole(&w, &head, w.g.n);
        o.parts = parts;
        for (o.prepacked_verify = 0; o.prepacked_verify < 2; o.prepacked_verify++) {
            check(dspark_model_open(&m, w.d.dir, &o, &err), DSPARK_EFORMAT, &err);
            assert_null(m);
            assert_string_equal(err.where, w.g.path);
            assert_non_null(strstr(err.message, parts == 1 ? "(q_a, shard 0) belongs to none of the parts 0x1"
                                                           : "belongs to none of the parts 0x3"));
        }
    }
    head.parts = 7; /* the same sections, rightly named */
    sign_whole(&w, &head, w.g.n);
    for (uint32_t parts = 1; parts <= 3; parts += 2) {
        o.parts = parts;
        check(dspark_model_open(&m, w.d.dir, &o, &err), DSPARK_OK, &err);
        dspark_model_close(m);
    }
    free_whole(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_flipped_bytes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lengths, setup, teardown),
        cmocka_unit_test_setup_teardown(test_versions, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lying_heads, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lying_tables, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lying_packings, setup, teardown),
        cmocka_unit_test(test_lying_bounds), cmocka_unit_test(test_lying_parts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
