// Package spank is the C of the SPANK plug-in as Go functions, on a stand-in for Slurm,
// so that Go tests it. Nothing that is shipped imports it: the plug-in itself is built
// by build.mk, from the same files and without Go.
package spank

/*
#cgo CFLAGS: -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -Wno-unused-parameter
#include <stdlib.h>
#include "plugin.h"
#include "fakeslurm.h"
extern unsigned int plugin_version;

// Slurm's type of these is a function type, which cgo does not call.
static int init(int ac, char **av) { return slurm_spank_init(NULL, ac, av); }
static int init_post_opt(void) { return slurm_spank_init_post_opt(NULL, 0, NULL); }
static int user_init(void) { return slurm_spank_user_init(NULL, 0, NULL); }
static int task_init(void) { return slurm_spank_task_init(NULL, 0, NULL); }
static void settings(struct sl_settings *s, int ac, char **av) { sl_settings_read(s, ac, av, slurm_error); }
*/
import "C"

import "unsafe"

// Kind is sl_kind, what an answer says.
type Kind int

// The kinds.
const (
	None   Kind = C.SL_NONE
	Env    Kind = C.SL_ENV
	Error  Kind = C.SL_ERROR
	Silent Kind = C.SL_SILENT
)

// Change is one change of the environment; Separator is 0 where it is set.
type Change struct {
	Separator   byte
	Name, Value string
}

// Answer is what the plug-in understands of a daemon's answer.
type Answer struct {
	Kind    Kind
	Text    string
	Changes []Change
}

func answer(a *C.struct_sl_answer) Answer {
	var out Answer
	var c C.struct_sl_change
	for C.sl_answer_next(a, &c) {
		out.Changes = append(out.Changes, Change{byte(c.separator), C.GoString(c.name), C.GoString(c.value)})
	}
	out.Kind, out.Text = Kind(a.kind), C.GoString(&a.text[0])
	return out
}

// Read parses an answer.
func Read(b []byte) Answer {
	// Exactly as long, so that a sanitizer sees one byte too far.
	p := C.CBytes(b)
	defer C.free(p)
	var a C.struct_sl_answer
	C.sl_answer_read(&a, (*C.char)(p), C.size_t(len(b)))
	return answer(&a)
}

// Ask asks the daemon at a socket, as slurmstepd does.
func Ask(socket string, job, step uint32, absentMS, answerMS int) Answer {
	s := C.CString(socket)
	defer C.free(unsafe.Pointer(s))
	var a C.struct_sl_answer
	var none [1]C.char
	memory := C.sl_ask(&a, s, C.uint32_t(job), C.uint32_t(step), &none[0], C.int(absentMS), C.int(answerMS))
	defer C.free(unsafe.Pointer(memory))
	return answer(&a)
}

// ListChange puts item first in a list or, without add, takes it out.
func ListChange(item, list string, separator byte, add bool) string {
	i, l := C.CString(item), C.CString(list)
	defer C.free(unsafe.Pointer(i))
	defer C.free(unsafe.Pointer(l))
	out := C.sl_list_change(i, l, C.char(separator), C.bool(add))
	defer C.free(unsafe.Pointer(out))
	return C.GoString(out)
}

// Context is where the plug-in runs.
type Context int

// The contexts.
const (
	Local     Context = C.S_CTX_LOCAL
	Allocator Context = C.S_CTX_ALLOCATOR
	Remote    Context = C.S_CTX_REMOTE
	Slurmd    Context = C.S_CTX_SLURMD
	JobScript Context = C.S_CTX_JOB_SCRIPT
)

// Process is one of Slurm's, with the plug-in loaded. There is one at a time.
type Process struct{}

// Start loads the plug-in into a process of that context, with the arguments of
// plugstack.conf.
func Start(where Context, job, step uint32, task int, args ...string) (Process, int) {
	C.fake_reset(C.int(where), C.uint32_t(job), C.uint32_t(step), C.int(task))
	av, free := cargs(args)
	defer free()
	return Process{}, int(C.init(C.int(len(args)), av))
}

func cargs(args []string) (**C.char, func()) {
	p := C.malloc(C.size_t(len(args)+1) * C.size_t(unsafe.Sizeof(uintptr(0))))
	list := unsafe.Slice((**C.char)(p), len(args)+1)
	for i, a := range args {
		list[i] = C.CString(a)
	}
	list[len(args)] = nil
	return (**C.char)(p), func() {
		for _, s := range list[:len(args)] {
			C.free(unsafe.Pointer(s))
		}
		C.free(p)
	}
}

// Option gives an option, as the command line does; with flag it has no value.
func (Process) Option(name, value string, flag, remote bool) int {
	n := C.CString(name)
	defer C.free(unsafe.Pointer(n))
	var v *C.char
	if !flag {
		v = C.CString(value)
		defer C.free(unsafe.Pointer(v))
	}
	r := C.int(0)
	if remote {
		r = 1
	}
	return int(C.fake_option(n, v, r))
}

// InitPostOpt, UserInit and TaskInit are Slurm's calls of these names.
func (Process) InitPostOpt() int { return int(C.init_post_opt()) }

// UserInit see InitPostOpt.
func (Process) UserInit() int { return int(C.user_init()) }

// TaskInit see InitPostOpt. It ends this process if the task must not run.
func (Process) TaskInit() int { return int(C.task_init()) }

// Setenv sets a variable of the job.
func (Process) Setenv(name, value string) {
	n, v := C.CString(name), C.CString(value)
	defer C.free(unsafe.Pointer(n))
	defer C.free(unsafe.Pointer(v))
	C.fake_setenv(n, v)
}

// OwnEnv is a variable of this process as C has it, "" if there is none. Go does not notice what C changes.
func (Process) OwnEnv(name string) string {
	n := C.CString(name)
	defer C.free(unsafe.Pointer(n))
	return C.GoString(C.getenv(n))
}

// Getenv is a variable of the job, "" if there is none.
func (Process) Getenv(name string) string {
	n := C.CString(name)
	defer C.free(unsafe.Pointer(n))
	return C.GoString(C.fake_getenv(n))
}

// Control is a variable that Prolog and Epilog will see.
func (Process) Control(name string) string {
	n := C.CString(name)
	defer C.free(unsafe.Pointer(n))
	return C.GoString(C.fake_control(n))
}

// Log is what was logged, a line each.
func (Process) Log() string { return C.GoString(C.fake_log()) }

// Tasks sets how many tasks the step has on this node; without it, those up to this one.
func (Process) Tasks(local int) { C.fake_tasks(C.int(local)) }

// Full lets every later change of the environment fail.
func (Process) Full() { C.fake_full() }

// Loud lets log lines go to stderr too.
func (Process) Loud() { C.fake_loud() }

// Socket is the daemon's socket by the arguments of plugstack.conf, and whether
// something in them was complained of.
func Socket(args ...string) (string, string) {
	C.fake_reset(0, 0, 0, 0)
	av, free := cargs(args)
	defer free()
	var s C.struct_sl_settings
	C.settings(&s, C.int(len(args)), av)
	return C.GoString(&s.socket[0]), C.GoString(C.fake_log())
}

// Version is plugin_version, as major and minor number.
func Version() (major, minor int) {
	return int(C.plugin_version >> 16), int(C.plugin_version >> 8 & 255)
}
