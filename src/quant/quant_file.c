/* Reading the two files that may describe a quantisation. Owns no meaning: that is quant_config.c. */
#include "quant/quant_file.h"

#include <stdlib.h>

#include "ckpt/config.h"

dspark_status dspark__quant_config_read(dspark__quant_config **out, const char *path,
                                        dspark_error *err)
{
    char *config = NULL, *modelopt = NULL;
    size_t n_config = 0, n_modelopt = 0;

    *out = NULL;
    dspark_status st = dspark__config_text(&config, &n_config, path, err);
    if (st == DSPARK_OK) st = dspark__config_modelopt_text(&modelopt, &n_modelopt, path, err);
    if (st == DSPARK_OK)
        st = dspark__quant_config_parse(out, config, n_config, modelopt, n_modelopt, "config.json", err);
    free(config);
    free(modelopt);
    return st;
}
