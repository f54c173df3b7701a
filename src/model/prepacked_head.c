/* Head and table entries of a prepacked file, to bytes and back. Back means: a hostile file's. */
#include <string.h>

#include "base/digest.h"
#include "base/status.h"
#include "model/prepacked.h"

#define MAGIC "DSPARKPK"
#define BYTE_ORDER_MARK 0x01020304u
#define HEX 32u
#define DIGEST_AT (DSPARK__HEAD_BYTES - HEX)

/* ---- a cursor in both directions ---- */

typedef struct cursor {
    unsigned char *to;         /* writing, or NULL */
    const unsigned char *from; /* reading, or NULL */
    size_t at;
} cursor;

static void number(cursor *c, uint64_t *value, size_t n_bytes)
{
    if (c->from) *value = 0;
    for (size_t i = 0; i < n_bytes; i++) {
        if (c->to) c->to[c->at + i] = (unsigned char)(*value >> (8 * i));
        else *value |= (uint64_t)c->from[c->at + i] << (8 * i);
    }
    c->at += n_bytes;
}

static void number32(cursor *c, uint32_t *value)
{
    uint64_t wide = *value;
    number(c, &wide, 4);
    *value = (uint32_t)wide;
}

/* 32 characters, filled up with zeros; text[33]. */
static void text(cursor *c, char *text)
{
    if (c->to) memcpy(c->to + c->at, text, strnlen(text, HEX));
    else memcpy(text, c->from + c->at, HEX);
    text[HEX] = 0;
    c->at += HEX;
}

static void head_fields(cursor *c, dspark__prepacked_head *h)
{
    number32(c, &h->parts);
    number32(c, &h->n_sections);
    number(c, &h->file_bytes, 8);
    number(c, &h->table_offset, 8);
    text(c, h->config);
    text(c, h->identity);
    text(c, h->target);
    text(c, h->context);
    text(c, h->q_a);
    text(c, h->block);
    text(c, h->table);
}

static void digest_of(char hex[33], const void *bytes, size_t n)
{
    dspark__digest d;
    dspark__digest_init(&d);
    dspark__digest_update(&d, bytes, n);
    dspark__digest_hex(&d, hex);
}

/* ---- the head ---- */

void dspark__prepacked_encode(const dspark__prepacked_head *h,
                              unsigned char bytes[DSPARK__HEAD_BYTES])
{
    dspark__prepacked_head copy = *h;
    const uint32_t mark = BYTE_ORDER_MARK;
    uint32_t versions[3] = {DSPARK__PREPACKED_VERSION, DSPARK__PANEL_LAYOUT, DSPARK__PANEL};
    char hex[33];
    cursor c = {.to = bytes, .at = 12};
    memset(bytes, 0, DSPARK__HEAD_BYTES);
    memcpy(bytes, MAGIC, 8);
    memcpy(bytes + 8, &mark, 4); /* the one number in this machine's order */
    for (size_t i = 0; i < 3; i++) number32(&c, &versions[i]);
    head_fields(&c, &copy);
    digest_of(hex, bytes, DIGEST_AT);
    memcpy(bytes + DIGEST_AT, hex, HEX);
}

static dspark_status check_version(const char *what, uint32_t found, uint32_t want, const char *path,
                                   dspark_error *err)
{
    if (found == want) return DSPARK_OK;
    return dspark__fail(err, DSPARK_EUNSUPPORTED, path,
                        "%s %u; this library reads %u: pack the checkpoint again", what, found, want);
}

dspark_status dspark__prepacked_decode(dspark__prepacked_head *h,
                                       const unsigned char bytes[DSPARK__HEAD_BYTES], const char *path,
                                       dspark_error *err)
{
    static const char *const names[3] = {"format version", "panel layout", "panels of"};
    const uint32_t want[3] = {DSPARK__PREPACKED_VERSION, DSPARK__PANEL_LAYOUT, DSPARK__PANEL};
    uint32_t mark, found[3];
    char hex[33];
    cursor c = {.from = bytes, .at = 12};
    memset(h, 0, sizeof *h);
    if (memcmp(bytes, MAGIC, 8) != 0)
        return dspark__fail(err, DSPARK_EFORMAT, path, "not a prepacked file: it does not begin with %s",
                            MAGIC);
    memcpy(&mark, bytes + 8, 4);
    if (mark == 0x04030201u)
        return dspark__fail(err, DSPARK_EUNSUPPORTED, path,
                            "made on a machine of the other byte order: pack the checkpoint again");
    for (size_t i = 0; i < 3; i++) number32(&c, &found[i]);
    for (size_t i = 0; i < 3; i++) {
        dspark_status st = check_version(names[i], found[i], want[i], path, err);
        if (st != DSPARK_OK) return st;
    }
    digest_of(hex, bytes, DIGEST_AT);
    if (mark != BYTE_ORDER_MARK || memcmp(hex, bytes + DIGEST_AT, HEX) != 0)
        return dspark__fail(err, DSPARK_EFORMAT, path, "the head is damaged: its digest is %s", hex);
    head_fields(&c, h);
    return DSPARK_OK;
}

/* ---- an entry of the table ---- */

static void packing_fields(cursor *c, dspark__packing *p)
{
    uint32_t scale = (uint32_t)p->format.scale, row_scale = p->row_scale != 0,
             permuted = p->permuted != 0, narrow = p->narrow != 0;
    number32(c, &p->bits);
    number32(c, &p->format.bits);
    number32(c, &scale);
    number32(c, &p->format.block);
    number32(c, &p->group);
    number32(c, &row_scale);
    number32(c, &permuted);
    number32(c, &narrow);
    for (size_t i = 0; i < 256; i++) {
        uint64_t value = p->format.table[i];
        number(c, &value, 2);
        p->format.table[i] = (uint16_t)value;
    }
    /* Out of range stays out of range, for whoever checks. */
    p->format.scale = (dspark__code_scale)(scale <= DSPARK__CODE_OFFSET ? scale : 99);
    p->row_scale = row_scale <= 1 ? (int)row_scale : -1;
    p->permuted = permuted <= 1 ? (int)permuted : -1;
    p->narrow = narrow <= 1 ? (int)narrow : -1;
}

static void section_fields(cursor *c, dspark__section *s)
{
    text(c, s->name);
    text(c, s->scheme);
    number32(c, &s->shard);
    number32(c, &s->rows);
    number32(c, &s->k);
    number(c, &s->offset, 8);
    number(c, &s->bytes, 8);
    text(c, s->digest);
    packing_fields(c, &s->packing);
}

void dspark__section_encode(const dspark__section *s, unsigned char bytes[DSPARK__SECTION_BYTES])
{
    dspark__section copy = *s;
    cursor c = {.to = bytes};
    memset(bytes, 0, DSPARK__SECTION_BYTES);
    section_fields(&c, &copy);
}

/* What kernels rely on (kern/kern.h). */
static const char *wrong_packing(const dspark__packing *p)
{
    if (p->row_scale < 0 || p->permuted < 0 || p->narrow < 0) return "a flag is neither 0 nor 1";
    if (p->narrow && p->bits != 16) return "codes with a narrow panel";
    if (p->group % 8 != 0) return "the group is no multiple of 8";
    if (p->bits == 16)
        return p->format.bits || p->group || p->row_scale || p->permuted ? "bf16 with scales" : NULL;
    if (p->bits != 8 && p->bits != 4) return "the bits are none of 16, 8, 4";
    if (p->format.bits != p->bits) return "two numbers of bits";
    if (p->format.scale > DSPARK__CODE_OFFSET) return "an unknown kind of scales";
    if ((p->format.scale == DSPARK__CODE_PLAIN) != (p->format.block == 0)) return "scales without a block";
    return p->format.block % 8 != 0 ? "the block is no multiple of 8" : NULL;
}

dspark_status dspark__section_decode(dspark__section *s,
                                     const unsigned char bytes[DSPARK__SECTION_BYTES], uint32_t index,
                                     const char *path, dspark_error *err)
{
    cursor c = {.from = bytes};
    memset(s, 0, sizeof *s);
    section_fields(&c, s);
    const char *wrong = wrong_packing(&s->packing);
    const int bound = strcmp(s->scheme, DSPARK__SECTION_BOUND) == 0;
    /* A size that overflows is 0, which no section has. */
    const uint64_t size = wrong || !dspark__packing_bytes(&s->packing, s->rows, s->k) ? 0
                          : bound ? dspark__markov_bound_bytes(&s->packing, s->rows, s->k)
                                  : dspark__packing_bytes(&s->packing, s->rows, s->k);
    if (!wrong && (size == 0 || size != s->bytes))
        wrong = "its bytes are not those of its shape";
    if (!wrong) return DSPARK_OK;
    return dspark__fail(err, DSPARK_EFORMAT, path, "section %u (%s, shard %u, %u x %u): %s", index,
                        s->name, s->shard, s->rows, s->k, wrong);
}

void dspark__prepacked_config(char hex[33], const char *config, size_t n_config, const char *modelopt,
                              size_t n_modelopt)
{
    const uint64_t sizes[2] = {n_config, n_modelopt};
    dspark__digest d;
    dspark__digest_init(&d);
    dspark__digest_update(&d, sizes, sizeof sizes);
    dspark__digest_update(&d, config, n_config);
    if (modelopt) dspark__digest_update(&d, modelopt, n_modelopt);
    dspark__digest_hex(&d, hex);
}
