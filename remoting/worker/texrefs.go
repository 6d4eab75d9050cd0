package worker

// Texture references, and the resources that texture and surface objects tell of.

/*
#include "driver.h"
*/
import "C"

import (
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// cuTexRefDestroy destroys a reference that the client has created. One of a module ends with the module.
func (s *session) cuTexRefDestroy(h href) C.CUresult {
	if s.owner(refOf(wire.KindTexRef, h.id)) != 0 {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	rc := C.call_cuTexRefDestroy(C.uint64_t(h.real))
	if rc == 0 {
		s.unbind(wire.KindTexRef, h.id)
	}
	return rc
}

func (s *session) cuTexRefGetBorderColor(c0, c1, c2, c3 *C.float, h href) C.CUresult {
	var c [4]C.float
	rc := C.sl_texref_border(C.uint64_t(h.real), &c[0], 0)
	*c0, *c1, *c2, *c3 = c[0], c[1], c[2], c[3]
	return C.CUresult(rc)
}

func (s *session) cuTexRefSetBorderColor(h href, c0, c1, c2, c3 float32) C.CUresult {
	c := [4]C.float{C.float(c0), C.float(c1), C.float(c2), C.float(c3)}
	return C.CUresult(C.sl_texref_border(C.uint64_t(h.real), &c[0], 1))
}

func (s *session) cuTexObjectGetResourceDesc(d *C.CUDA_RESOURCE_DESC, object uint64) C.CUresult {
	rc := C.call_cuTexObjectGetResourceDesc(d, C.uint64_t(object))
	return s.resourceOut(d, rc)
}

func (s *session) cuSurfObjectGetResourceDesc(d *C.CUDA_RESOURCE_DESC, object uint64) C.CUresult {
	rc := C.call_cuSurfObjectGetResourceDesc(d, C.uint64_t(object))
	return s.resourceOut(d, rc)
}

// resourceOut puts the client's ids where the driver has put handles.
func (s *session) resourceOut(d *C.CUDA_RESOURCE_DESC, rc C.CUresult) C.CUresult {
	if rc != 0 {
		return rc
	}
	field := (*uint64)(unsafe.Pointer(&d.res))
	switch d.resType {
	case C.CU_RESOURCE_TYPE_ARRAY:
		*field = uint64(s.outHandle(wire.KindArray, *field)) << 4
	case C.CU_RESOURCE_TYPE_MIPMAPPED_ARRAY:
		*field = uint64(s.outHandle(wire.KindMipmap, *field)) << 4
	}
	return 0
}
