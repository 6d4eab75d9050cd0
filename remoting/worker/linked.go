package worker

// Images as the driver takes them.
//
// A linked set becomes a wrapper as nvcc registers it with the runtime, which
// hands it to the driver as it is: a magic number, version 2, the linked image
// and a list of the objects, which ends with a null pointer.

/*
#include <stdlib.h>
*/
import "C"

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/worker/cubin"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

const (
	wrapperMagic  = 0x466243b1
	wrapperLinked = 2 // version
	wrapperSize   = 24
)

// code is an image in memory, in the form that the driver takes.
type code struct {
	mem     *store.Image
	wrapper unsafe.Pointer // C's, nil for what needs none
}

// openCode gives the driver's form of a stored image.
func openCode(mem *store.Image) (*code, error) {
	c := &code{mem: mem}
	if !cubin.IsLinked(mem.Bytes()) {
		return c, nil
	}
	set, err := cubin.Linked(mem.Bytes())
	if err != nil {
		return nil, err
	}
	c.wrapper = C.calloc(1, C.size_t(wrapperSize+8*len(set)))
	if c.wrapper == nil {
		return nil, fmt.Errorf("no memory for a list of %d objects", len(set))
	}
	b := unsafe.Slice((*byte)(c.wrapper), wrapperSize+8*len(set))
	le := binary.LittleEndian
	le.PutUint32(b, wrapperMagic)
	le.PutUint32(b[4:], wrapperLinked)
	le.PutUint64(b[8:], uint64(uintptr(at(set[0]))))
	le.PutUint64(b[16:], uint64(uintptr(c.wrapper)+wrapperSize))
	for i, object := range set[1:] {
		le.PutUint64(b[wrapperSize+8*i:], uint64(uintptr(at(object))))
	}
	return c, nil
}

// pointer is what the driver is given.
func (c *code) pointer() unsafe.Pointer {
	if c.wrapper != nil {
		return c.wrapper
	}
	return at(c.mem.Bytes())
}

// loaded releases what nobody needs once the driver has loaded the image, unless it is to be
// kept. Of a linked set the driver may link more later, for another GPU.
func (c *code) loaded(keep bool) *code {
	if c.wrapper != nil || keep {
		return c
	}
	c.close()
	return nil
}

// image is what stays in memory of an image, nil where that is nothing.
func (c *code) image() *store.Image {
	if c == nil {
		return nil
	}
	return c.mem
}

func (c *code) close() {
	if c == nil {
		return
	}
	C.free(c.wrapper)
	c.wrapper = nil
	c.mem.Close()
}
