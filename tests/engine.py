"""Functions of a test in MXNet's engine, between its own work."""

import contextlib
import ctypes

import mxnet as mx
from mxnet import nd
from mxnet.base import _LIB, check_call


@contextlib.contextmanager
def queued(function, read=(), written=()):
    """Let MXNet's engine call a function between other work on some arrays of one context."""
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: function())
    device = [*read, *written][0].context.device_id
    context = (ctypes.c_int32 * 2)(mx.cpu().device_typeid, device)
    sides = []
    for arrays in (read, written):
        handles = (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays))
        sides += [handles, len(arrays)]
    check_call(_LIB.MXEnginePushSyncND(called, None, None, context, *sides, None, 0, b"of a test"))
    yield  # the engine does not keep the function alive
    nd.waitall()
