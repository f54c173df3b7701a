/* A model's packed weights as one file that is mapped, read-only and shared by all processes that map it,
 * instead of being packed at each opening. The checkpoint stays the source of everything else.
 *
 *   head     4096 bytes: magic, byte order, versions, parts, what the file was made of, its own digest
 *   sections one a shard, in the order in which an opening fills them, each at a multiple of 64 bytes
 *            (large ones of 2 MB): codes, scales, group scales, row scales, permutation, as in memory; and one
 *            of the Markov bias's bounds behind its shard, where it has any
 *   table    one entry of DSPARK__SECTION_BYTES a section: name, shard, shape, packing, place, digest
 *
 * Numbers of head and table are little-endian; sections are in the byte order that the head names.
 *
 * A file is never silently stale. Its head names the checkpoint twice: by identity (names, sizes, inodes
 * and times of the files, which no write leaves as they are) and by digests of contents. With the same
 * identity an opening believes the file; with another one it reads and hashes all that the parts in use
 * were made of, and refuses the file when anything differs. What is read is hostile until checked. */
#ifndef DSPARK_MODEL_PREPACKED_H
#define DSPARK_MODEL_PREPACKED_H

#include "ckpt/checkpoint.h"
#include "model/markov_bound.h"
#include "model/merged_linear.h"

#define DSPARK__PREPACKED_VERSION 3u
/* The layout of panels, of which bf16, codes and bounds have one each (kern/kern.h). Whoever changes a byte of
 * one counts this up. */
#define DSPARK__PANEL_LAYOUT 3u
#define DSPARK__HEAD_BYTES 4096u
#define DSPARK__SECTION_BYTES 768u

/* The scheme of a section that holds what markov_bound.h makes of the linear before it. */
#define DSPARK__SECTION_BOUND "bound"

typedef struct dspark__prepacked_head {
    uint32_t parts;    /* DSPARK_PART_*: CONTEXT, that and Q_A, or all three */
    uint32_t n_sections;
    uint64_t file_bytes, table_offset;
    /* 32 hex digits each, or "" */
    char config[33];   /* the texts of config.json and hf_quant_config.json */
    char identity[33]; /* of the checkpoint's files */
    char target[33];   /* of the target's files, when the LM head is theirs */
    char context[33];  /* dspark_model_fingerprint */
    char q_a[33];      /* the same over q_a */
    char block[33];    /* dspark_model_block_fingerprint: ends with the LM head */
    char table[33];    /* of the table's bytes */
} dspark__prepacked_head;

typedef struct dspark__section {
    char name[33];     /* of the merged linear */
    char scheme[33];   /* or DSPARK__SECTION_BOUND: bounds of its rows, and packing is that of the linear */
    uint32_t shard, rows, k;
    dspark__packing packing;
    uint64_t offset, bytes;
    char digest[33];   /* of the bytes */
} dspark__section;

/* ---- bytes: prepacked_head.c ---- */

void dspark__prepacked_encode(const dspark__prepacked_head *h,
                              unsigned char bytes[DSPARK__HEAD_BYTES]);
dspark_status dspark__prepacked_decode(dspark__prepacked_head *h,
                                       const unsigned char bytes[DSPARK__HEAD_BYTES], const char *path,
                                       dspark_error *err);
void dspark__section_encode(const dspark__section *s, unsigned char bytes[DSPARK__SECTION_BYTES]);
/* DSPARK_EFORMAT for an entry that says what no packing is. Its place is not checked. */
dspark_status dspark__section_decode(dspark__section *s,
                                     const unsigned char bytes[DSPARK__SECTION_BYTES], uint32_t index,
                                     const char *path, dspark_error *err);
/* Of the texts of config.json and hf_quant_config.json (NULL: there is none). */
void dspark__prepacked_config(char hex[33], const char *config, size_t n_config, const char *modelopt,
                              size_t n_modelopt);

/* ---- reading: prepacked.c ---- */

typedef struct dspark__prepacked dspark__prepacked;

/* Map a file and check head, table and every place in it. path must outlive it. */
dspark_status dspark__prepacked_open(dspark__prepacked **out, const char *path, dspark_error *err);
void dspark__prepacked_close(dspark__prepacked *p);
/* The parts that a file holds; head and table are checked. */
dspark_status dspark__prepacked_parts(const char *path, uint32_t *parts, dspark_error *err);
const dspark__prepacked_head *dspark__prepacked_get_head(const dspark__prepacked *p);
/* Refuse a file that lacks some of `parts` or was made under another config than the one of this digest. */
dspark_status dspark__prepacked_match(const dspark__prepacked *p, uint32_t parts, const char *config,
                                      dspark_error *err);
/* DSPARK_EMODEL: `what` of the checkpoint is not what the file was made of. */
dspark_status dspark__prepacked_same(const dspark__prepacked *p, const char *what, const char *recorded,
                                     const char *found, dspark_error *err);
/* Let shard `s` be the next section, which must be its; with `verify` its bytes are hashed. */
dspark_status dspark__prepacked_take(dspark__prepacked *p, dspark__merged_linear *ml, uint32_t s,
                                     int verify, dspark_error *err);

/* The bounds of shard 0 of `ml`, which has just been taken, if the next section is theirs; else *out is empty. */
dspark_status dspark__prepacked_take_bound(dspark__prepacked *p, const dspark__merged_linear *ml,
                                           dspark__markov_bound *out, int verify, dspark_error *err);

/* All of `parts` has been taken: a file that holds them and no others must have no section left. */
dspark_status dspark__prepacked_end(const dspark__prepacked *p, uint32_t parts, dspark_error *err);

/* ---- writing: prepack.c ---- */

typedef struct dspark__packer dspark__packer;

/* A shard of `ml` begins; its packing and scheme are known. */
dspark_status dspark__packer_begin(dspark__packer *p, const dspark__merged_linear *ml, uint32_t s,
                                   const dspark__scheme *scheme, dspark_error *err);
dspark_status dspark__packer_put(dspark__packer *p, const void *data, size_t n, dspark_error *err);
/* All of the section's bytes have been put. */
dspark_status dspark__packer_end(dspark__packer *p, dspark_error *err);
/* All of shard `s`, filled in memory; with `bound` not NULL its bounds instead. */
dspark_status dspark__packer_put_shard(dspark__packer *p, const dspark__merged_linear *ml, uint32_t s,
                                       const dspark__markov_bound *bound, dspark_error *err);
/* What the file is made of, filled while the checkpoint is read. */
dspark__prepacked_head *dspark__packer_head(dspark__packer *p);

dspark_status dspark__prepack(const char *ckpt, const char *out, const dspark_model_opts *opts,
                              dspark_error *err);
/* DSPARK_OK: the file is whole and what an opening of ckpt would pack. */
dspark_status dspark__prepacked_check(const char *ckpt, const char *file, const dspark_model_opts *opts,
                                      dspark_error *err);

#endif
