/* Calibrations on disk. Here because src/spec knows no files and src/ckpt no calibration. */
#ifndef DSPARK_MODEL_CALIBRATION_FILE_H
#define DSPARK_MODEL_CALIBRATION_FILE_H

#include "dspark/dspark.h"

dspark_status dspark__calibration_save(const dspark_calibration *c, const char *path,
                                       dspark_error *err);
dspark_status dspark__calibration_load(dspark_calibration *out, const char *path, dspark_error *err);

#endif
