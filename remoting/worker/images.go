package worker

// Modules, libraries and kernels.
//
// An image is named by its SHA-256. IMAGE_LOAD takes it from the store; when it
// is not there the client sends it in IMAGE_CHUNKs and asks again. The reply to
// the load lists the image's kernels; KERNEL_BIND gives one an id without
// asking the driver, because asking would make the driver load a kernel that
// may never run: that happens at the first use.

/*
#include "driver.h"
#include <stdlib.h>
#include <string.h>
*/
import "C"

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/cubin"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

// image is a loaded module or library.
type image struct {
	real    uint64
	library bool
	sum     store.Sum
	size    uint64
	kernels []*kernel
	listed  names // of its kernels; nil where the driver does not list them
	dead    bool
	used    bool   // a kernel of it has run
	vars    uint64 // bytes reserved for its variables
	dev     int
	code    *code  // of an image that stays in memory; otherwise nil
	linked  uint64 // the library that a module of a linked set came from; otherwise 0
}

// kernel is a kernel that the client gave an id.
type kernel struct {
	id    uint32
	at    int // in img.kernels
	img   *image
	name  string
	real  uint64 // CUkernel of a library, CUfunction of a module; 0 before the first use
	fn    uint64 // the CUfunction of a library's kernel in context fnCtx
	fnCtx uint32
	local uint64 // bytes of local memory for each thread, known with real
}

type images struct {
	up       *store.Upload
	sent     *store.Image // the last one uploaded, until it is loaded
	sentSum  store.Sum
	late     *store.Upload // the last one's, until placeImage
	unstored sync.Once     // the log says that images are not stored
}

// openImage gives a stored image, or the one that was just sent, which need not be in the store.
func (s *session) openImage(sum store.Sum, size uint64) (*store.Image, error) {
	if m := &s.images; m.sent != nil && m.sentSum == sum && uint64(len(m.sent.Bytes())) == size {
		mem := m.sent
		m.sent = nil
		return mem, nil
	}
	return s.store.Get(sum, size)
}

// dropSent forgets the image that was sent last.
func (m *images) dropSent() {
	if m.sent != nil {
		_ = m.sent.Close()
		m.sent = nil
	}
}

func (m *images) init() {}

func (s *session) imageChunk(p []byte) int32 {
	s.dec.Reset(p)
	var c wire.ImageChunk
	c.Decode(&s.dec)
	data := s.dec.Rest()
	if s.dec.Err() != nil || c.Total > wire.MaxImage {
		return s.malformed()
	}
	sum, off, total := store.Sum(c.Sum), c.Offset, c.Total
	m := &s.images
	if m.up != nil && (m.up.Sum() != sum || m.up.Total() != total || off == 0) {
		m.up.Abort()
		m.up = nil
	}
	if m.up == nil {
		s.placeImage()
		m.dropSent()
		up, err := s.store.Begin(sum, total)
		if err != nil {
			s.log.Error("image not taken", "image", sum, "error", err)
			return C.CUDA_ERROR_OUT_OF_MEMORY
		}
		m.up = up
	}
	err := m.up.Write(off, data)
	if err == nil && m.up.Complete() {
		up := m.up
		m.sent, err = up.Commit()
		m.sentSum, m.up, m.late = sum, nil, up
		s.tellUnstored(up) // its file may have failed in the commit only
	}
	if err == nil {
		return 0
	}
	if m.up != nil {
		m.up.Abort()
		m.up = nil
	}
	s.log.Error("image not taken", "image", sum, "error", err)
	if errors.Is(err, store.ErrMismatch) {
		s.violation(err.Error())
		return C.CUDA_ERROR_INVALID_IMAGE
	}
	return C.CUDA_ERROR_OUT_OF_MEMORY
}

// placeImage has the store publish the image that was sent last, while the session goes on. It is called after the image's load, which
// sets facts of it.
func (s *session) placeImage() {
	if up := s.images.late; up != nil {
		s.images.late = nil
		s.store.Later(up.Sum(), func() { s.publish(up) })
	}
}

func (s *session) publish(up *store.Upload) {
	up.Publish()
	s.tellUnstored(up)
}

func (s *session) tellUnstored(up *store.Upload) {
	if why := up.Unstored(); why != nil {
		s.images.unstored.Do(func() {
			s.log.Warn("images are not stored: each program sends them again", "image", up.Sum(), "bytes", up.Total(), "error", why)
		})
	}
}

// placed is how long the end of a session waits for images and content that are being stored. Its memory on the GPU is free after that only.
const placed = 200 * time.Millisecond

// settleStores waits for what is being stored.
func (s *session) settleStores() {
	until := time.Now().Add(placed)
	if s.store != nil {
		s.store.Settle(placed)
	}
	s.contents.settle(time.Until(until))
}

func (s *session) imageLoad(p []byte) int32 {
	defer s.placeImage()
	d := &s.dec
	d.Reset(p)
	var m wire.ImageLoad
	m.Decode(d)
	sum, size, id, library := store.Sum(m.Sum), m.Size, m.ID, m.Library == 1
	n := d.Elements(m.NOptions, wire.JITOptionSize, wire.MaxJITOptions)
	if d.Err() != nil || size == 0 || size > wire.MaxImage {
		return s.malformed()
	}
	mem, err := s.openImage(sum, size)
	if errors.Is(err, store.ErrNotFound) {
		return wire.ResultNotInStore
	}
	if err != nil {
		s.log.Error("image not loaded", "image", sum, "error", err)
		return C.CUDA_ERROR_INVALID_IMAGE
	}
	var from *code
	if err = cubin.Fits(mem.Bytes()); err == nil {
		from, err = openCode(mem)
	}
	if err != nil {
		mem.Close()
		s.log.Error("image not loaded", "image", sum, "error", err)
		return C.CUDA_ERROR_INVALID_IMAGE
	}
	defer func() { from.close() }()
	j, rc := s.jitOptions(n)
	defer j.free()
	if rc == 0 && d.Done() != nil {
		return s.malformed()
	}
	kind := wire.KindModule
	if library {
		kind = wire.KindLibrary
	}
	// Variables are reserved before the driver takes them: a module's with its
	// load, a library's with the first use of one of its kernels.
	var vars uint64
	dev := 0
	if c := s.context(); c != nil {
		dev = c.dev
	}
	if rc == 0 {
		n, err := s.variables(mem, sum, dev)
		if err != nil {
			s.log.Error("image not loaded", "image", sum, "error", err)
			rc = C.CUDA_ERROR_INVALID_IMAGE
		} else if n >= account.Granule {
			vars = account.RoundUp(n)
			if !s.mem.reserve(dev, vars) {
				vars, rc = 0, C.CUDA_ERROR_OUT_OF_MEMORY
			}
		}
	}
	img := &image{library: library, sum: sum, size: size, vars: vars, dev: dev}
	if rc == 0 {
		rc = img.load(from, j)
	}
	if rc == 0 && !s.mem.settleOverhead() {
		img.unload() // its variables do not fit: it must go again
		s.mem.settleOverhead()
		rc = C.CUDA_ERROR_OUT_OF_MEMORY
	}
	if rc != 0 {
		s.mem.release(dev, vars)
		s.bind(kind, id, 0, C.CUresult(rc))
		j.appendLogs(&s.enc)
		return rc
	}
	img.code, from = from.loaded(!mem.Stored() && C.sl_has(paramInfo(library)) == 0), nil
	s.bindObj(kind, id, img.real, img)
	img.listed = s.listKernels(img.real, library)
	j.appendLogs(&s.enc)
	return 0
}

// variables gives the device memory that an image's variables take, in bytes. Compressed code is unpacked for that, which
// takes as long as all the rest of a load, so the answer is kept with the image.
func (s *session) variables(mem *store.Image, sum store.Sum, dev int) (uint64, error) {
	v := &s.snap.Devices[dev]
	cc := int(v.CCMajor)*10 + int(v.CCMinor)
	name := variablesFact(cc)
	if n, known := mem.Fact(name); known {
		return n, nil
	}
	n, err := cubin.Variables(mem.Bytes(), cc)
	if err == nil {
		s.store.SetFact(sum, mem, name, n)
	}
	return n, err
}

// variablesFact names that answer in the store, for a compute capability, as 90 for 9.0.
func variablesFact(cc int) string { return fmt.Sprintf("variables.%d.%d", cubin.VariablesVersion, cc) }

// load gives an image to the driver. A linked set is taken as a library only; a module of it is that library's.
func (img *image) load(from *code, j *jit) int32 {
	var real, lib C.uint64_t
	var rc C.int
	switch {
	case img.library:
		rc = C.sl_library_load(&real, from.pointer(), C.uint32_t(j.n), j.opts, j.vals)
	case from.wrapper != nil:
		rc = C.sl_linked_module_load(&real, &lib, from.pointer(), C.uint32_t(j.n), j.opts, j.vals)
	default:
		rc = C.sl_module_load(&real, from.pointer(), C.uint32_t(j.n), j.opts, j.vals)
	}
	img.real, img.linked = uint64(real), uint64(lib)
	return int32(rc)
}

// unload takes an image from the driver.
func (img *image) unload() C.CUresult {
	switch {
	case img.library:
		return C.call_cuLibraryUnload(C.uint64_t(img.real))
	case img.linked != 0:
		return C.call_cuLibraryUnload(C.uint64_t(img.linked))
	}
	return C.call_cuModuleUnload(C.uint64_t(img.real))
}

// maxKernelNames bounds the names that a load's reply carries, in bytes.
const maxKernelNames = 12 << 20

// listKernels appends the image's kernel names and gives them, or says that there is no list.
func (s *session) listKernels(real uint64, library bool) names {
	var n C.uint32_t
	list := func(p *C.uint64_t, room C.uint32_t) C.int {
		if library {
			return C.sl_library_kernels(C.uint64_t(real), p, room, &n)
		}
		return C.sl_module_functions(C.uint64_t(real), p, room, &n)
	}
	start := s.enc.Len()
	unlisted := func() names {
		s.enc.Truncate(start)
		(&wire.ImageLoadReply{NKernels: wire.NotListed}).Encode(&s.enc)
		return nil
	}
	if list(nil, 0) != 0 || n > 1<<20 {
		return unlisted()
	}
	ks := make([]C.uint64_t, n)
	if n > 0 && list(&ks[0], n) != 0 {
		return unlisted()
	}
	listed := make(names, 0, n)
	(&wire.ImageLoadReply{NKernels: uint32(n)}).Encode(&s.enc)
	for _, k := range ks[:n] {
		var name *C.char
		var rc C.int
		if library {
			rc = C.sl_kernel_name(k, &name)
		} else {
			rc = C.sl_function_name(k, &name)
		}
		if rc != 0 || name == nil || s.enc.Len()-start > maxKernelNames {
			return unlisted()
		}
		l := int(C.strlen(name))
		if l > 0xffff {
			return unlisted()
		}
		text := unsafe.Slice((*byte)(unsafe.Pointer(name)), l)
		s.enc.U16(uint16(l))
		s.enc.Bytes(text)
		listed = append(listed, hashName(text))
	}
	slices.Sort(listed)
	if !s.keep("lists of kernels", 8*len(listed)) {
		return nil // their names count one by one
	}
	return listed
}

func (s *session) kernelBind(p []byte) int32 {
	d := &s.dec
	d.Reset(p)
	var m wire.KernelBind
	m.Decode(d)
	id, from := m.Kernel, m.Image
	module := m.Length&wire.BindModule != 0
	name := d.Bytes(int(m.Length &^ wire.BindModule))
	if d.Done() != nil || len(name) == 0 {
		return s.malformed()
	}
	kind := wire.KindLibrary
	if module || s.tables[kind].live(from) == nil {
		kind = wire.KindModule
	}
	img := s.image(kind, from)
	if img == nil {
		rc := s.badHandle(kind, from)
		s.bind(wire.KindKernel, id, 0, C.CUresult(rc))
		return rc
	}
	// What is not there is not kept: the client can ask for names as fast as it can write them.
	// A library whose code the driver could not compile has an empty list, and an error for every name.
	if len(img.listed) > 0 && !img.listed.has(name) {
		s.bind(wire.KindKernel, id, 0, C.CUDA_ERROR_NOT_FOUND)
		return C.CUDA_ERROR_NOT_FOUND
	}
	if !s.keep("kernels' names", kernelCost+len(name)) {
		s.bind(wire.KindKernel, id, 0, C.CUDA_ERROR_OUT_OF_MEMORY)
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	k := &kernel{id: id, at: len(img.kernels), img: img, name: string(name), fnCtx: noCtx}
	img.kernels = append(img.kernels, k)
	s.bindObj(wire.KindKernel, id, 0, k)
	s.own(refOf(kind, from), wire.KindKernel, id)
	return 0
}

// forgetKernel lets go of what is known of a kernel that the driver does not find.
func (s *session) forgetKernel(p *slot, k *kernel, rc int32) {
	p.err, p.obj = rc, nil
	all := k.img.kernels
	last := all[len(all)-1]
	all[k.at], last.at = last, k.at
	all[len(all)-1] = nil
	k.img.kernels = all[:len(all)-1]
	s.unkeep(kernelCost + len(k.name))
}

func (s *session) image(kind int, id uint32) *image {
	if p := s.tables[kind].live(id); p != nil && p.err == 0 {
		img, _ := p.obj.(*image)
		return img
	}
	return nil
}

// kernel returns the kernel of an id, found in its image if this is its first
// use; nil and an error otherwise.
func (s *session) kernel(id uint32) (*kernel, int32) {
	p := s.tables[wire.KindKernel].live(id)
	if p == nil {
		return nil, C.CUDA_ERROR_INVALID_HANDLE
	}
	if p.err != 0 {
		return nil, p.err
	}
	k, _ := p.obj.(*kernel)
	if k == nil || k.img.dead {
		return nil, C.CUDA_ERROR_INVALID_HANDLE
	}
	if k.real != 0 {
		return k, 0
	}
	name := C.CString(k.name)
	defer C.free(unsafe.Pointer(name))
	var real C.uint64_t
	var rc C.int
	if k.img.library {
		rc = C.sl_library_kernel(&real, C.uint64_t(k.img.real), name)
	} else {
		rc = C.sl_module_function(&real, C.uint64_t(k.img.real), name)
	}
	if rc != 0 {
		s.forgetKernel(p, k, int32(rc))
		return nil, int32(rc)
	}
	var local C.int
	if k.img.library {
		dev, _ := s.device()
		rc = C.sl_kernel_attr(&local, C.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, real, C.int(dev))
	} else {
		rc = C.sl_function_attr(&local, C.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, real)
	}
	if rc == 0 && local > 0 {
		k.local = uint64(local)
	}
	k.real = uint64(real)
	p.real = k.real
	return k, 0
}

func (s *session) kernelHandle(id uint32) (uint64, bool) {
	k, rc := s.kernel(id)
	if rc != 0 {
		return 0, false
	}
	return k.real, true
}

// function gives the CUfunction of a kernel in the current context.
func (s *session) function(id uint32) (uint64, bool) {
	k, rc := s.kernel(id)
	if rc != 0 {
		return 0, false
	}
	if !k.img.library {
		return k.real, true
	}
	if k.fnCtx != s.cur {
		var fn C.uint64_t
		if rc := C.sl_kernel_function(&fn, C.uint64_t(k.real)); rc != 0 {
			return 0, false
		}
		k.fn, k.fnCtx = uint64(fn), s.cur
	}
	return k.fn, true
}

// numAttrs is how many function attributes KERNEL_INFO tells.
const numAttrs = 16

// maxParams bounds a kernel's parameter list.
const maxParams = 4096

func (s *session) kernelInfo(p []byte) int32 {
	d := &s.dec
	d.Reset(p)
	var m wire.KernelInfo
	m.Decode(d)
	id, dev := m.Kernel, int(m.Device)
	if d.Done() != nil {
		return s.malformed()
	}
	if dev < 0 || dev >= len(s.snap.Devices) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	k, rc := s.kernel(id)
	if rc != 0 {
		return rc
	}
	params, rc := s.kernelParams(k, dev)
	if rc != 0 {
		return rc
	}
	(&wire.KernelInfoReply{NParams: uint32(len(params))}).Encode(&s.enc)
	for _, q := range params {
		(&wire.KernelParam{Offset: q.Offset, Size: q.Size}).Encode(&s.enc)
	}
	s.enc.U32(numAttrs)
	for a := range uint32(numAttrs) {
		var v, rc C.int
		if k.img.library {
			rc = C.sl_kernel_attr(&v, C.uint32_t(a), C.uint64_t(k.real), C.int(dev))
		} else {
			rc = C.sl_function_attr(&v, C.uint32_t(a), C.uint64_t(k.real))
		}
		(&wire.KernelAttr{Result: int32(rc), Value: int32(v)}).Encode(&s.enc)
	}
	return 0
}

// paramInfo is the driver's function that tells the parameters of an image's kernels.
func paramInfo(library bool) C.int {
	if library {
		return C.FN_cuKernelGetParamInfo
	}
	return C.FN_cuFuncGetParamInfo
}

// kernelParams gives a kernel's parameter layout: from the driver, or where it
// is older than CUDA 12.4, from the image itself.
func (s *session) kernelParams(k *kernel, dev int) ([]cubin.Param, int32) {
	if C.sl_has(paramInfo(k.img.library)) == 0 {
		mem := k.img.code.image()
		if mem == nil {
			var err error
			if mem, err = s.store.Get(k.img.sum, k.img.size); err != nil {
				s.log.Error("no parameter layout", "kernel", k.name, "error", err)
				return nil, C.CUDA_ERROR_NOT_SUPPORTED
			}
			defer mem.Close()
		}
		v := &s.snap.Devices[dev]
		ps, err := cubin.Params(mem.Bytes(), k.name, int(v.CCMajor)*10+int(v.CCMinor))
		if err != nil {
			s.log.Error("no parameter layout: the driver does not tell and the image neither", "kernel", k.name, "error", err)
			return nil, C.CUDA_ERROR_NOT_SUPPORTED
		}
		return ps, 0
	}
	var ps []cubin.Param
	for i := range C.uint64_t(maxParams) {
		var off, size C.uint64_t
		var rc C.int
		if k.img.library {
			rc = C.sl_kernel_param(C.uint64_t(k.real), i, &off, &size)
		} else {
			rc = C.sl_function_param(C.uint64_t(k.real), i, &off, &size)
		}
		if rc == C.CUDA_ERROR_INVALID_VALUE {
			return ps, 0 // past the last one
		}
		if rc != 0 {
			return nil, int32(rc)
		}
		ps = append(ps, cubin.Param{Offset: uint32(off), Size: uint32(size)})
	}
	return nil, C.CUDA_ERROR_INVALID_VALUE
}

// unload forgets an image and its kernels.
func (s *session) unload(kind int, h href) {
	if img := s.image(kind, h.id); img != nil {
		img.dead = true
		for _, k := range img.kernels {
			k.real, k.fn = 0, 0
			s.unkeep(kernelCost + len(k.name))
			s.unbind(wire.KindKernel, k.id) // the client may give the number to another now
		}
		s.unkeep(8 * len(img.listed))
		img.kernels, img.listed = nil, nil
		s.dropImage(img)
	}
	s.unbind(kind, h.id)
	s.mem.measureSoon()
}

func (s *session) cuLibraryUnload(h href) C.CUresult {
	rc := C.call_cuLibraryUnload(C.uint64_t(h.real))
	s.unload(wire.KindLibrary, h)
	return rc
}

// dropImage lets go of what an image that is unloaded held.
func (s *session) dropImage(img *image) {
	s.mem.release(img.dev, img.vars)
	img.vars = 0
	img.code.close()
	img.code = nil
}

func (s *session) cuModuleUnload(h href) C.CUresult {
	var rc C.CUresult
	if img := s.image(wire.KindModule, h.id); img != nil {
		rc = img.unload()
	} else {
		rc = C.call_cuModuleUnload(C.uint64_t(h.real)) // a library's
	}
	s.unload(wire.KindModule, h)
	return rc
}

// refuse answers what is not supported, by name and once in the log.
func (s *session) refuse(what string) int32 {
	if !s.refused[what] {
		s.refused[what] = true
		s.log.Warn("refused: not supported", "what", what)
	}
	return C.CUDA_ERROR_NOT_SUPPORTED
}
