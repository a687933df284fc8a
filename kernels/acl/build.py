# SPDX-License-Identifier: Apache-2.0
"""Builds the native module `xmoe.kernels.acl._native` (cffi, API mode; needs a C compiler only).

`setup.py` names it as `kernels/acl/build.py:ffibuilder`. For development:
`python kernels/acl/build.py` builds in place, and only when an input is newer than the module.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import cffi

HERE = Path(__file__).resolve().parent
MODULE = "xmoe.kernels.acl._native"


def _load(name: str) -> ModuleType:
    """A sibling file as a module, by path: the package it belongs to is not built yet."""
    full = f"_xmoe_acl_build_{name}"
    spec = importlib.util.spec_from_file_location(full, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module


HELPERS_DECL = """
void* xm_dlopen(const char* path, int noload, char* error, size_t error_size);
void* xm_dlsym(void* handle, const char* name, char* error, size_t error_size);
void* xm_dlsym_global(const char* name);
int xm_dladdr(void* address, char* path, size_t path_size, void** start);
size_t xm_loaded_objects(char* names, size_t names_size);
"""

HELPERS = r"""
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The error text is copied here: dlerror() belongs to the thread, and Python may run other dl calls
   before it could ask. */
static void xm_copy_error(char* error, size_t size) {
  const char* text = dlerror();
  if (size > 0) snprintf(error, size, "%s", text != NULL ? text : "");
}
static void* xm_dlopen(const char* path, int noload, char* error, size_t error_size) {
  dlerror();
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | (noload ? RTLD_NOLOAD : 0));
  xm_copy_error(error, error_size);
  return handle;
}
static void* xm_dlsym(void* handle, const char* name, char* error, size_t error_size) {
  dlerror();
  void* address = dlsym(handle, name);
  xm_copy_error(error, error_size);
  return address;
}
static void* xm_dlsym_global(const char* name) {
  void* address = dlsym(RTLD_DEFAULT, name);
  dlerror();
  return address;
}
static int xm_dladdr(void* address, char* path, size_t path_size, void** start) {
  Dl_info info;
  if (dladdr(address, &info) == 0 || info.dli_fname == NULL) return 0;
  snprintf(path, path_size, "%s", info.dli_fname);
  *start = info.dli_saddr;
  return 1;
}
struct xm_names { char* at; size_t left, total; };
static int xm_add_object(struct dl_phdr_info* info, size_t size, void* data) {
  (void)size;
  struct xm_names* names = data;
  size_t length = strlen(info->dlpi_name);
  if (length == 0) return 0;
  names->total += length + 1;
  if (length + 1 < names->left) {
    memcpy(names->at, info->dlpi_name, length);
    names->at[length] = '\n';
    names->at += length + 1;
    names->left -= length + 1;
    *names->at = 0;
  }
  return 0;
}
/* Newline separated names of all loaded objects; returns the size needed. */
static size_t xm_loaded_objects(char* names, size_t names_size) {
  struct xm_names state = {names, names_size, 1};
  if (names_size > 0) *names = 0;
  dl_iterate_phdr(xm_add_object, &state);
  return state.total;
}
"""


def sources() -> tuple[str, str]:
    """(declarations for cffi, C source) of the native module."""
    prototypes = _load("prototypes")
    variants, op_lists = _load("variants"), _load("op_lists")
    types = (HERE / "decl" / "types.h").read_text()
    wrappers = [
        prototypes.wrapper(symbol, proto) for symbol, proto in prototypes.read_groups(HERE / "decl")
    ]
    for variant in variants.VARIANTS.values():
        params = tuple((variants.CTYPES[p.kind], p.name) for p in variant.params)
        proto = prototypes.Prototype("aclnnStatus", "aclnnMegaMoeGetWorkspaceSize", params)
        wrappers.append(prototypes.wrapper(f"mega_moe_workspace__{variant.id}", proto))
        # Phase two is the same everywhere; one trampoline per variant keeps the pair together.
        names = ("workspace", "workspaceSize", "executor", "stream")
        launch = tuple(zip(variants.LAUNCH_CTYPES, names, strict=True))
        proto = prototypes.Prototype("aclnnStatus", "aclnnMegaMoe", launch)
        wrappers.append(prototypes.wrapper(f"mega_moe_launch__{variant.id}", proto))
    plan = HERE / "native"
    shared, calls = (plan / "plan_types.h").read_text(), (plan / "plan_calls.h").read_text()
    declarations = types + HELPERS_DECL + "\n".join(d for d, _ in wrappers) + shared + calls
    source = HELPERS + types + "\n".join(d for _, d in wrappers) + shared
    return declarations, source + (plan / "plan.c").read_text() + plan_table(variants, op_lists)


def plan_table(variants: ModuleType, op_lists: ModuleType) -> str:
    """Phase one over a plan's slots, one C function and one table row per argument list."""
    members = {"i64": "i", "i": "i", "F": "f", "d": "d"}
    ends = {"W": "size", "X": "executor"}
    lists = [
        (v.id, v.signature, [(p.kind, variants.CTYPES[p.kind]) for p in v.params])
        for v in variants.VARIANTS.values()
    ]
    tail = [(kind, variants.CTYPES[kind]) for kind in ends]
    lists += [
        (name, letters, [(letter, op_lists.CTYPES[letter]) for letter in letters] + tail)
        for name, letters in op_lists.OPERATORS.items()
    ]
    functions, rows = [], []
    for name, signature, params in lists:
        values = [
            ends.get(kind) or f"({ctype})slot[{i}].{members.get(kind, 'p')}"
            for i, (kind, ctype) in enumerate(params)
        ]
        functions.append(
            f"static aclnnStatus xm_phase_one__{name}(const xm_slot* slot, void* fn, "
            f"uint64_t* size, aclOpExecutor** executor) {{\n"
            f"  return ((aclnnStatus (*)({', '.join(ctype for _, ctype in params)}))fn)"
            f"({', '.join(values)});\n}}\n"
        )
        rows.append(f'  {{"{name}", "{signature}", {len(params)}, xm_phase_one__{name}}},\n')
    return (
        f"{''.join(functions)}static const xm_list* xm_all_lists(void) {{\n"
        f"  static const xm_list all[] = {{\n{''.join(rows)}  {{0}}}};\n  return all;\n}}\n"
    )


def make_builder() -> cffi.FFI:
    """The cffi builder of the native module."""
    declarations, source = sources()
    builder = cffi.FFI()
    builder.cdef(declarations)
    builder.set_source(
        MODULE, source, libraries=["dl"], extra_compile_args=["-std=gnu11", "-O2", "-Wall"]
    )
    return builder


def build_in_place() -> Path:
    """Compile next to the sources when an input is newer than the module; return its path."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    target = HERE / f"_native{suffix}"
    inputs = [HERE / f for f in ("build.py", "prototypes.py", "variants.py", "op_lists.py")]
    inputs += sorted([*(HERE / "decl").glob("*.h"), *(HERE / "native").iterdir()])
    newest = max(f.stat().st_mtime for f in inputs)
    if not target.exists() or target.stat().st_mtime < newest:
        with tempfile.TemporaryDirectory() as scratch:
            built = make_builder().compile(tmpdir=scratch, verbose=False)
            # Copy then rename: a process that has the old module mapped keeps a whole file.
            staged = target.with_suffix(f".{os.getpid()}.tmp")
            shutil.copyfile(built, staged)
            staged.replace(target)
    return target


if __name__ == "__main__":
    print(build_in_place())
else:
    ffibuilder = make_builder()
