/* Counter-based noise: Philox4x32-10 (Salmon et al., 2011). A number is a function of its key alone. */
#ifndef DSPARK_SPEC_RNG_H
#define DSPARK_SPEC_RNG_H

#include "dspark/dspark.h"

/* One block: ten rounds over a counter of 4 words under a key of 2. */
void dspark__philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* dspark_uniform: the key of a sequence is Philox of the sequence under the seed; the counter is the
 * position and the purpose. In [0, 1). */
double dspark__uniform(const dspark_noise_key *key);

#endif
