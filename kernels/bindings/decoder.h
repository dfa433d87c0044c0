// The part of qforge.ops._native that bindings/decoder.cpp adds.
#pragma once

#include <nanobind/nanobind.h>

void bind_decoder(nanobind::module_ &m);
