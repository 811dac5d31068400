/* Written by make spec from tformer_deploy/__init__.py: the version of these headers. */
#ifndef TFORMER_VERSION_H
#define TFORMER_VERSION_H

#define TFORMER_VERSION_MAJOR 0
#define TFORMER_VERSION_MINOR 1
#define TFORMER_VERSION_PATCH 0
#define TFORMER_VERSION "0.1.0"

#endif
