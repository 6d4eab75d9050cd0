package xid

// Class says who has to do something about an Xid.
type Class int

// The classes.
const (
	// Program: a program can cause it, or it is not in our table. There is nothing to do about the GPU.
	Program Class = iota
	// Watch: the GPU or its driver had a fault, and goes on by itself, or a program may have caused it.
	Watch
	// Repair: after it NVIDIA asks for a reset of the GPU, a reboot of its node, or a repair, whatever the cause was.
	Repair
)

// catalogue has the Xids of other classes than Program. Source: NVIDIA's "Xid Errors", its catalogue of Xids
// (docs.nvidia.com/deploy/xid-errors). Class Repair has those whose immediate action there is to reset the GPU or to restart the machine, and
// those with a hardware procedure of their own (48, 74). It does not have 46 and 109, although their action is a reset: a kernel that
// does not end may cause them. Class Watch has hardware faults after which the program is restarted (94) or nothing is done (63, 92).
// If a row is to be remapped after a 63, NVML says so.
var catalogue = map[int]struct {
	class Class
	what  string
}{
	46:              {Watch, "the GPU stopped processing"},
	48:              {Repair, "uncorrectable ECC error"},
	54:              {Watch, "auxiliary power is not connected"},
	61:              {Watch, "the power management unit stopped at a breakpoint"},
	62:              {Repair, "the power management unit has halted"},
	63:              {Watch, "a row is to be remapped, or a page retired"},
	64:              {Repair, "a row could not be remapped, or a page not retired"},
	74:              {Repair, "NVLink error"},
	79:              {Repair, "the GPU has fallen off the bus"},
	92:              {Watch, "many corrected ECC errors"},
	93:              {Watch, "the infoROM was erased too often"},
	94:              {Watch, "contained ECC error: the program that used the memory has ended"},
	95:              {Repair, "uncontained ECC error"},
	109:             {Watch, "switching between programs took too long"},
	110:             {Repair, "security fault"},
	119:             {Repair, "the GPU's system processor does not answer"},
	120:             {Repair, "error of the GPU's system processor"},
	121:             {Watch, "error of the link between CPU and GPU"},
	136:             {Repair, "training of an NVLink failed"},
	140:             {Repair, "unrecovered ECC error"},
	143:             {Repair, "the GPU could not be initialised"},
	144:             {Watch, "NVLink error"},
	145:             {Watch, "NVLink error"},
	146:             {Watch, "NVLink error"},
	147:             {Watch, "NVLink error"},
	148:             {Watch, "NVLink error"},
	149:             {Watch, "NVLink error"},
	150:             {Watch, "NVLink error"},
	recoveryChanged: {Watch, "the driver says what the GPU needs"},
	155:             {Repair, "NVLink error"},
	156:             {Repair, "a part of the GPU was retired"},
	157:             {Watch, "a part of the GPU could not be retired"},
	158:             {Repair, "fatal timeout"},
	171:             {Watch, "uncorrectable error of the GPU's memory"},
	172:             {Watch, "uncorrectable error of the GPU's caches"},
}

// Describe says what an Xid means, "" for those of class Program.
func Describe(code int) (what string, class Class) {
	c := catalogue[code]
	return c.what, c.class
}
