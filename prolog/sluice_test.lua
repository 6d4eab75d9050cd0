-- Tests of sluice.lua with a slurm table that only remembers; run by lua_test.go, on the
-- oldest and a newer Lua that Slurm's builds use. Arguments: the folder of sluice.lua, and
-- a file for the table of pools, a seed, and the folder of the tables of cases.
local dir, pools, cases = arg[1], arg[2], arg[4]
local NO_VAL, NO_VAL16 = 4294967294, 65534

local told, logged
slurm = {
  SUCCESS = 0, ERROR = -1, ESLURM_ACCESS_DENIED = 2002,
  log_user = function(...) told[#told + 1] = string.format(...) end,
  log_info = function(...) logged[#logged + 1] = string.format(...) end,
  log_error = function(...) logged[#logged + 1] = "error: " .. string.format(...) end,
}

local failures = 0
local function check(ok, fmt, ...)
  if not ok then
    failures = failures + 1
    print(debug.traceback(string.format(fmt, ...), 2))
  end
end

local SITE = [[return { version = 1,
  pools = {
    ["default"] = { licence = "rgpu", gpus = 8, mem = 80000, types = {
      h200 = { licence = "rgpu_h200", gpus = 4, mem = 140000 }, a100 = { gpus = 4, mem = 80000 } } },
    ["big"] = { licence = "rgpu_big", gpus = 100, mem = 80000 },
    ["new"] = { licence = "rgpu_new", gpus = 2, types = { l40 = { gpus = 2 } } },
  },
  partitions = { small = { mem = 20000 }, big = { pool = "big" } } }]]

local function write(text)
  local f = assert(io.open(pools, "w"))
  f:write(text)
  f:close()
end

local function fresh()
  write(SITE)
  local m = dofile(dir .. "/sluice.lua")
  m.table(pools)
  return m
end

local PARTS = { main = { flag_default = 1 }, small = { flag_default = 0 }, big = { flag_default = 0 } }

-- job makes a description as slurmctld does: numbers that are not set are NO_VAL.
local function job(fields)
  local jd = { min_nodes = NO_VAL, max_nodes = NO_VAL, num_tasks = NO_VAL, ntasks_per_node = NO_VAL16, spank_job_env_size = 0 }
  for k, v in pairs(fields) do
    if k == "options" then
      jd.spank_job_env, jd.spank_job_env_size = {}, #v
      for i, e in ipairs(v) do jd.spank_job_env[i - 1] = e end
    else
      jd[k] = v
    end
  end
  return jd
end

local m = fresh()

local function apply(fields)
  told, logged = {}, {}
  local jd = job(fields)
  return m.apply(jd, PARTS, 1000), jd, table.concat(told, "\n")
end

-- accepted: the licences and the number of nodes that a request comes to.
local function accepted(fields, licenses, nodes, note)
  local rc, jd, text = apply(fields)
  local name = (fields.tres_per_node or "-") .. " " .. tostring(fields.min_nodes) .. " " .. (fields.options and fields.options[1] or "")
  check(rc == 0, "%s: refused: %s", name, text)
  check(jd.licenses == licenses, "%s: licences %s, want %s", name, tostring(jd.licenses), tostring(licenses))
  check(jd.min_nodes == (nodes or NO_VAL) and jd.max_nodes == (nodes or NO_VAL), "%s: nodes %s-%s, want %s",
    name, tostring(jd.min_nodes), tostring(jd.max_nodes), tostring(nodes))
  if note then check(text:find(note, 1, true), "%s: told %q, want %q", name, text, note) else check(text == "", "%s: told %q", name, text) end
end

-- refused: what the user is told; the job is left as it was.
local function refused(fields, ...)
  local before = fields.licenses
  local rc, jd, text = apply(fields)
  local name = (fields.tres_per_node or "-") .. " " .. tostring(fields.min_nodes) .. " " .. tostring(before)
  check(rc ~= 0, "%s: accepted with %s", name, tostring(jd.licenses))
  check(jd.licenses == before, "%s: licences became %s", name, tostring(jd.licenses))
  check(text:match("^sluice: "), "%s: told %q", name, text)
  for _, part in ipairs({ ... }) do check(text:find(part, 1, true), "%s: told %q, want %q", name, text, part) end
end

-- A job that does not ask is left alone.
accepted({}, nil)
accepted({ licenses = "matlab:2" }, "matlab:2")
accepted({ licenses = "matlab:1|ansys:2" }, "matlab:1|ansys:2")
accepted({ tres_per_node = "gres:gpu:h100:2,gres:shard:4" }, nil)
accepted({ tres_per_node = "gres:gpu:rgpu:2" }, nil) -- a type of gpu
accepted({ tres_per_job = "gres:gpu:4", tres_per_task = "cpu:1,gres/gpu=1" }, nil)
accepted({ partition = "nosuch" }, nil)
accepted({ options = { "OTHER=1", "RGPU_REPORT=1" } }, nil)
accepted({ options = { "RGPU_SPREAD=1" } }, nil)

-- Each release's spelling.
for _, prefix in ipairs({ "", "gres:", "gres/" }) do
  accepted({ tres_per_node = prefix .. "rgpu:50" }, "rgpu:50", 1)
  accepted({ tres_per_node = prefix .. "rgpu=50" }, "rgpu:50", 1)
  accepted({ tres_per_node = prefix .. "rgpu:h200:50" }, "rgpu:50,rgpu_h200:50", 1)
  accepted({ tres_per_node = prefix .. "gpu:1," .. prefix .. "rgpu:50" }, "rgpu:50", 1)
  accepted({ tres_per_node = prefix .. "rgpu:050" }, "rgpu:50", 1)
end
accepted({ gres = "gres:rgpu:50" }, "rgpu:50", 1)
accepted({ tres_per_node = "rgpu:a100:100" }, "rgpu:100", 1) -- a type without a licence of its own
accepted({ tres_per_node = "rgpu:800" }, "rgpu:800", 1)
accepted({ tres_per_node = "rgpu:1" }, "rgpu:1", 1)
accepted({ tres_per_node = "rgpu:1k", options = { "RGPU_POOL=big" } }, "rgpu_big:1024", 1)

-- Counts.
for _, bad in ipairs({ "rgpu:0", "rgpu:801", "rgpu:4294967295", "rgpu:4294967297", "rgpu:18446744073709551617",
                       "rgpu:" .. string.rep("9", 400), "rgpu:50p", "rgpu:1t", "rgpu:50k" }) do
  refused({ tres_per_node = "gres:" .. bad }, "give 1 to 800 percent of a GPU, as --gres=rgpu:50")
end
for _, bad in ipairs({ "rgpu:-5", "rgpu:1.5", "rgpu:5e1", "rgpu:0x50", "rgpu:", "rgpu:50%", "rgpu: 50", "rgpu:h200:", "rgpu:h200:x",
                       "rgpu:50x", "rgpu:h200:50:3", "rgpu::50", "rgpu:h200=50", "rgpu/50", "rgpu:1e309", "rgpu:nan", "rgpu:50:h200" }) do
  refused({ tres_per_node = "gres:" .. bad })
end
refused({ tres_per_node = "gres:rgpu" }, "does not say how much", "1 to 800")
refused({ tres_per_node = "gres:rgpu:h200" }, "does not say how much", "1 to 400", "rgpu:h200:50")
refused({ tres_per_node = "gres:rgpu:h200:401" }, "give 1 to 400 percent")
refused({ tres_per_node = "gres:rgpu:b200:10" }, "no such type", "a100, h200")
refused({ tres_per_node = "gres:rgpu:b200:10", partition = "big" }, "have no types; ask without one")
refused({ tres_per_node = "gres:rgpu:l40:10" }, "is in pool new; add --rgpu-pool=new")
refused({ tres_per_node = "gres:rgpu:50,gres:rgpu:60" }, "once")
refused({ tres_per_node = "gres:rgpu:h200:50,gres:rgpu:a100:20" }, "once")
refused({ tres_per_node = "gres:rgpu:50,gres:rgpu:0" }, "once")
-- 16 fractions on a node, however many GPUs there are.
refused({ tres_per_node = "gres:rgpu:1700", options = { "RGPU_POOL=big" } }, "give 1 to 1600 percent of a GPU, as --gres=rgpu:50")
refused({ tres_per_node = "gres:rgpu:1601", options = { "RGPU_POOL=big" } }, "1 to 1600")
accepted({ tres_per_node = "gres:rgpu:1600", options = { "RGPU_POOL=big" } }, "rgpu_big:1600", 1)

-- Requests that are not for a node.
refused({ tres_per_job = "gres:rgpu:50" }, "is for a node", "--gres=rgpu:PERCENT")
refused({ tres_per_task = "cpu=1,gres/rgpu=50" }, "--tres-per-task")
refused({ tres_per_task = "license/rgpu:5" }, "--tres-per-task")
refused({ tres_per_socket = "gres/rgpu:50" }, "socket")
refused({ tres_per_node = "gres:rgpu:50", tres_per_task = "gres/rgpu:50" }, "--tres-per-task")

-- Nodes.
local function half(fields) fields.tres_per_node = "gres:rgpu:50" return fields end
accepted(half({ min_nodes = 3, max_nodes = 3 }), "rgpu:150", 3)
accepted(half({ min_nodes = 2 }), "rgpu:100", 2) -- a list of two nodes
accepted(half({ max_nodes = 1 }), "rgpu:50", 1)
accepted(half({ min_nodes = 0 }), "rgpu:50", 1)
accepted(half({ num_tasks = 4 }), "rgpu:50", 1, "4 tasks on 1 node")
accepted(half({ num_tasks = 1 }), "rgpu:50", 1)
accepted(half({ num_tasks = 7, ntasks_per_node = 2 }), "rgpu:200", 4)
accepted(half({ num_tasks = 4, min_nodes = 2, max_nodes = 2 }), "rgpu:100", 2)
refused(half({ min_nodes = 1, max_nodes = 3 }), "--nodes=1-3", "one number")
refused(half({ max_nodes = 3 }), "--nodes=1-3")
refused(half({ min_nodes = 17, max_nodes = 17 }), "850 units", "800", "at most 47 percent")
refused(half({ min_nodes = 4294967290, max_nodes = 4294967290 }), "units")
refused(half({ num_tasks = 4294967290, ntasks_per_node = 1 }), "units")
refused({ tres_per_node = "gres:rgpu:h200:300", min_nodes = 2, max_nodes = 2 }, "600 units", "400", "at most 200")
refused(half({ dependency = "afterok:3,expand:12" }), "cannot grow")

-- Licences beside it.
accepted(half({ licenses = "matlab:1,ansys@srv:2" }), "matlab:1,ansys@srv:2,rgpu:50", 1)
accepted(half({ licenses = "matlab:1;ansys" }), "matlab:1,ansys,rgpu:50", 1)
refused(half({ licenses = "matlab|ansys" }), "choice")
for _, l in ipairs({ "rgpu:5", "rgpu", "matlab:1,rgpu_h200:3", "rgpu_any", "rgpu@server:4", "matlab|rgpu:1", "rgpu=4", " rgpu:1", "matlab;rgpu:1" }) do
  refused({ licenses = l }, "leave it out")
  refused(half({ licenses = l }), "leave it out")
end

-- Components of a heterogeneous job are charged each; later releases refuse that.
accepted(half({ het_job_offset = 1 }), "rgpu:50", 1)
accepted({ tres_per_node = "gres/rgpu:50", het_job_offset = 0 }, "rgpu:50", 1)
accepted({ tres_per_node = "gres/rgpu:50", het_job_offset = NO_VAL }, "rgpu:50", 1)
accepted({ tres_per_node = "gres/rgpu:50", het_job_offset = 1 }, "rgpu:50", 1, "in the first component")

-- Options: memory is charged where it is more than the compute, for the smallest GPU.
local function asks(...) return half({ options = { ... } }) end
accepted(asks("RGPU_MEM=20G"), "rgpu:50", 1)
accepted(asks("RGPU_MEM=60000M"), "rgpu:75", 1, "60000 MiB of a GPU's 80000 cost 75 units")
accepted(asks("RGPU_MEM=40001m"), "rgpu:51", 1, "51 units")
accepted(asks("RGPU_MEM=80000M"), "rgpu:100", 1, "100 units")
accepted({ tres_per_node = "rgpu:h200:50", options = { "RGPU_MEM=100000M" } }, "rgpu:72,rgpu_h200:72", 1, "72 units")
accepted({ tres_per_node = "rgpu:250", options = { "RGPU_MEM=60000M" } }, "rgpu:275", 1, "275 units")
accepted({ tres_per_node = "rgpu:200", options = { "RGPU_MEM=1G" } }, "rgpu:200", 1)
accepted({ tres_per_node = "rgpu:50", options = { "RGPU_POOL=new", "RGPU_MEM=900G" } }, "rgpu_new:50", 1) -- memory not known
refused(asks("RGPU_MEM=80001M"), "2M to 80000M", "pool default")
refused(asks("RGPU_MEM="), "--rgpu-mem")
accepted(asks("RGPU_POLICY=equal", "RGPU_SPREAD=1", "RGPU_REPORT=1"), "rgpu:50", 1)
accepted(asks("RGPU_POLICY=fixed-lend"), "rgpu:50", 1)
refused(asks("RGPU_POLICY=all"), "one of best-effort, equal, equal-lend, fixed, fixed-lend")
refused(asks("RGPU_SPREAD=yes"), "--rgpu-spread=yes: want no value")
accepted(asks("RGPU_POOL=new"), "rgpu_new:50", 1)
refused(asks("RGPU_POOL=nosuch"), "no such pool", "big, default, new")
refused(asks("RGPU_POOL=%s%n\27[31m"), "%s%n?[31m")
refused(asks("RGPU_MEM=1G", "RGPU_MEM=70G"), "twice")

-- The tables of cases that the other languages are held to as well.
local function each(name, f)
  local n = 0
  for line in io.lines(cases .. "/" .. name) do
    local value, want = line:match("^(.-) => (.*)$")
    if line:sub(1, 1) ~= "#" then
      n = n + 1
      f(value, want)
    end
  end
  check(n >= 10, "%s has %d cases", name, n)
end
local function one_gpu(mem, gpus)
  write(string.format('return { version = 1, pools = { ["default"] = { licence = "rgpu", gpus = %d, mem = %s } }, partitions = {} }', gpus, mem))
end
one_gpu(80000, 1)
each("times.txt", function(value, want)
  local request = { tres_per_node = "rgpu:50", options = { "RGPU_GRACE=" .. value } }
  if want == "-" then
    refused(request, "--rgpu-grace=", "0, or a whole number with s, m or h behind it up to 24h, as 30m")
  else
    accepted(request, "rgpu:50", 1)
  end
end)
one_gpu(16777216, 1)
each("sizes.txt", function(value, want)
  if want == "-" then
    refused({ tres_per_node = "rgpu:1", options = { "RGPU_MEM=" .. value } }, "--rgpu-mem=", "from 2M to 16T, as 20G")
  else
    -- Of a GPU with exactly so much memory, that much is all; of one with one MiB less it is too much.
    one_gpu(want, 1)
    local rc, jd, text = apply({ tres_per_node = "rgpu:1", options = { "RGPU_MEM=" .. value } })
    check(rc == 0 and jd.licenses == "rgpu:100", "%s: %s %s", value, tostring(jd.licenses), text)
    one_gpu(tonumber(want) - 1, 1)
    refused({ tres_per_node = "rgpu:1", options = { "RGPU_MEM=" .. value } }, "give --rgpu-mem of 2M to")
  end
end)
each("charges.txt", function(value, want)
  local percent, mem, gpu = value:match("^(%d+) (%d+) (%d+)$")
  one_gpu(gpu, 16)
  local rc, jd, text = apply({ tres_per_node = "rgpu:" .. percent, options = { "RGPU_MEM=" .. mem .. "M" } })
  check(rc == 0 and jd.licenses == "rgpu:" .. want, "%s: %s, want %s; %s", value, tostring(jd.licenses), want, text)
end)
one_gpu(80000, 16)
each("counts.txt", function(value, want)
  local rc, jd, text = apply({ tres_per_node = "gres:rgpu:" .. value })
  if want == "-" then
    check(rc ~= 0 and (text:find("not a whole number", 1, true) or text:find("does not say how much", 1, true)), "%s: %s %s", value, tostring(jd.licenses), text)
  elseif tonumber(want) > 1600 then
    check(rc ~= 0 and text:find("give 1 to 1600", 1, true), "%s: %s %s", value, tostring(jd.licenses), text)
  else
    check(rc == 0 and jd.licenses == "rgpu:" .. want, "%s: %s, want %s; %s", value, tostring(jd.licenses), want, text)
  end
end)
each("licences.txt", function(value, want)
  local rc, jd, text = apply({ licenses = value })
  check((rc ~= 0) == (want == "yes"), "%s: %d, want %s; %s", value, rc, want, text)
end)
write(SITE)

accepted({ options = { "RGPU_MEM=1G" } }, nil, nil, "asks for nothing without --gres=rgpu:PERCENT")
accepted({ options = { "RGPU_POOL=new", "RGPU_REPORT=1" } }, nil, nil, "--rgpu-pool")

-- What no GPU can hold for a program's context: the pool's bound, and the type's own.
write((SITE:gsub("mem = 80000, types", "mem = 80000, least = 502, least_percent = 2, types"):gsub("gpus = 4, mem = 140000", "gpus = 4, mem = 140000, least = 700, least_percent = 3")))
refused({ tres_per_node = "rgpu:1" }, "give 2 percent or more, or --rgpu-mem of 502M or more")
refused({ tres_per_node = "rgpu:101" }, "1 percent has less memory")
accepted({ tres_per_node = "rgpu:2" }, "rgpu:2", 1)
accepted({ tres_per_node = "rgpu:100" }, "rgpu:100", 1)
accepted({ tres_per_node = "rgpu:1", options = { "RGPU_MEM=502M" } }, "rgpu:1", 1)
refused({ tres_per_node = "rgpu:50", options = { "RGPU_MEM=501M" } }, "--rgpu-mem of 501 MiB: give --rgpu-mem of 502M or more")
refused({ tres_per_node = "rgpu:50", options = { "RGPU_MEM=90000M" } }, "give --rgpu-mem of 502M to 80000M")
refused({ tres_per_node = "rgpu:h200:2" }, "give 3 percent or more")
refused({ tres_per_node = "rgpu:h200:50", options = { "RGPU_MEM=600M" } }, "700M or more")
write(SITE)

-- Partitions: the job's, or the default one; several must agree.
accepted(half({ partition = "big" }), "rgpu_big:50", 1)
accepted(half({ partition = "big", options = { "RGPU_POOL=default" } }), "rgpu:50", 1)
accepted({ tres_per_node = "rgpu:10", partition = "small" }, "rgpu:25", 1, "25 units")
accepted({ tres_per_node = "rgpu:10", partition = "small", options = { "RGPU_MEM=1G" } }, "rgpu:10", 1)
accepted(half({ partition = "main,elsewhere" }), "rgpu:50", 1)
refused(half({ partition = "main,big" }), "name one partition")
refused(half({ partition = "main,small" }), "name one partition")
PARTS.main.flag_default, PARTS.big.flag_default = 0, 1
accepted(half({}), "rgpu_big:50", 1)
PARTS.main.flag_default, PARTS.big.flag_default = 1, 0

-- A table that is missing or broken refuses who asks, and nobody else; once read it is kept.
for _, text in ipairs({ "return {", "return 5", "return { version = 2 }", "error('x')", "return { version = 1, pools = {} }" }) do
  m = fresh()
  write(text)
  accepted({}, nil)
  refused(half({}), "sluice slurm lua")
  check(logged[1] and logged[1]:find(pools, 1, true), "%s: log says %s", text, tostring(logged[1]))
  write(SITE)
  accepted(half({}), "rgpu:50", 1)
  write(text)
  accepted(half({}), "rgpu:50", 1)
end
m = fresh()
os.remove(pools)
accepted({ licenses = "matlab:1" }, "matlab:1")
refused(half({}), "sluice slurm lua")
m = fresh()
accepted(half({}), "rgpu:50", 1)
write((SITE:gsub("gpus = 8", "gpus = 16")))
accepted({ tres_per_node = "rgpu:1600" }, "rgpu:1600", 1) -- a pool that grew, without a restart

-- Changes of a job that is there already.
local function modify(uid, record, changes)
  told, logged = {}, {}
  local rc = m.modify(job(changes), record, PARTS, uid)
  return rc, table.concat(told, "\n")
end
local function may(record, changes, what)
  local rc, text = modify(1000, record, changes)
  check(rc == 0, "%s: refused: %s", what, text)
end
local function must_not(record, changes, what)
  local rc = modify(1000, record, changes)
  check(rc == slurm.ESLURM_ACCESS_DENIED, "%s: %d", what, rc)
  check(logged[1] and logged[1]:find("refused"), "%s: nothing in the log", what)
  check(modify(0, record, changes) == 0, "%s: root was refused", what)
end
m = fresh()
local has = { licenses = "rgpu:100", tres_per_node = "gres:rgpu:50", min_nodes = 2, max_nodes = 2, partition = "main" }
local hasnt = { licenses = "matlab:1", min_nodes = 1, max_nodes = NO_VAL, partition = "main" }
for _, l in ipairs({ "", "rgpu:1", "matlab:1", "rgpu:100,matlab:1", "rgpu:100" }) do must_not(has, { licenses = l }, "licenses=" .. l) end
for _, l in ipairs({ "rgpu:1", "matlab:1,rgpu_h200:1" }) do must_not(hasnt, { licenses = l }, "none, licenses=" .. l) end
for _, g in ipairs({ "", "gres:rgpu:700", "gres:none", "gres:gpu:1" }) do must_not(has, { tres_per_node = g }, "gres=" .. g) end
must_not(hasnt, { tres_per_node = "gres:rgpu:1" }, "none, gres")
must_not(hasnt, { tres_per_task = "gres/rgpu=1" }, "none, tres-per-task")
must_not(hasnt, { tres_per_job = "gres/rgpu:1" }, "none, tres-per-job")
must_not(has, { min_nodes = 4, max_nodes = 4 }, "more nodes")
must_not(has, { min_nodes = 1, max_nodes = 1 }, "fewer nodes")
must_not(has, { max_nodes = 3 }, "a range of nodes")
must_not(has, { partition = "big" }, "another pool's partition")
must_not(has, { partition = "small" }, "a partition with other memory")
must_not(has, { dependency = "expand:3" }, "expand")
may(has, { min_nodes = 2, max_nodes = 2 }, "the same nodes")
may(has, { time_limit = 5 }, "time limit")
may(has, { partition = "elsewhere" }, "a partition of the same pool")
may(has, { num_tasks = 9 }, "tasks") -- the nodes are pinned
may(hasnt, { licenses = "matlab:2" }, "none, other licences")
may(hasnt, { licenses = "" }, "none, no licences")
may(hasnt, { tres_per_node = "gres:gpu:1" }, "none, gpu")
may(hasnt, { min_nodes = 4, max_nodes = 8 }, "none, nodes")
may(hasnt, { partition = "big" }, "none, partition")

-- Fields that a release does not have raise, or are of another type: nobody else suffers.
local odd = setmetatable({ tres_per_node = "gres:rgpu:50", licenses = nil }, { __index = function() error("no such field") end })
told, logged = {}, {}
check(m.apply(odd, PARTS, 1) == 0 and odd.licenses == "rgpu:50", "fields that raise: %s", tostring(told[1]))
refused(half({ spank_job_env = 5, spank_job_env_size = 3 }), "log says why")

-- slurmctld is not held up by what is long: it stands still meanwhile.
local function quick(what, fields)
  local begin = os.clock()
  apply(fields)
  check(os.clock() - begin < 1, "%s: %.1f s", what, os.clock() - begin)
end
for _, c in ipairs({ " ", ":", ",", "0", "=", "a", "rgpu", "a,", "|", "expand:" }) do
  local long = c:rep(math.floor(120000 / #c))
  for _, field in ipairs({ "tres_per_node", "tres_per_job", "licenses", "partition", "dependency" }) do
    local fields = { tres_per_node = "gres:rgpu:50" }
    fields[field] = (field:find("tres") and "rgpu:1" or "x") .. long .. "x"
    quick(field .. " of " .. c, fields)
  end
  quick("option of " .. c, half({ options = { "RGPU_MEM=" .. long .. "x", "RGPU_POOL=" .. long } }))
end
refused({ tres_per_node = "rgpu:50" .. (" "):rep(200000) }, "too long")
quick("many options", half({ spank_job_env = {}, spank_job_env_size = 1e9 }))

-- Random requests: never a fault, never less than what is asked, never more than there is.
math.randomseed(tonumber(arg[3]))
local words = { "rgpu", "gres:", "gres/", ":", "=", ",", "50", "h200", "a100", "0", "-", "1", "99999999999", "k", "gpu", " ", "\255", "%s", "7", ".", "rgpu:", "rgpu:30" }
local good = 0
for _ = 1, 30000 do
  local s = {}
  for i = 1, math.random(1, 6) do s[i] = words[math.random(#words)] end
  local n = math.random(0, 3)
  local rc, jd, text = apply({ tres_per_node = table.concat(s), min_nodes = n > 0 and n or NO_VAL, max_nodes = n > 0 and n or NO_VAL })
  check(not text:find("log says why"), "%s: a fault: %s", table.concat(s), tostring(logged[1]))
  if rc == 0 and jd.licenses then
    good = good + 1
    local units = tonumber(jd.licenses:match("^rgpu:(%d+)"))
    local asked = tonumber(table.concat(s):match("rgpu[:=].-(%d+)%s*,") or table.concat(s):match("rgpu[:=].-(%d+)[^%d]*$"))
    check(units and units >= 1 and units <= 800 and units % jd.min_nodes == 0, "%s: %s", table.concat(s), jd.licenses)
    check(jd.min_nodes == jd.max_nodes and jd.min_nodes == math.max(n, 1), "%s: %s nodes", table.concat(s), tostring(jd.min_nodes))
    check(asked and units == asked * jd.min_nodes or table.concat(s):find(",") or table.concat(s):find("k"), "%s on %d: %s", table.concat(s), n, jd.licenses)
  elseif table.concat(s):match("^rgpu[:=]") or table.concat(s):match(",rgpu$") then
    check(rc ~= 0, "%s: it asks, and was accepted without licences", table.concat(s))
  end
end
check(good > 100, "only %d random requests were good", good)

print(string.format("%s: %d failures, %d random requests accepted", _VERSION, failures, good))
os.exit(failures == 0 and 0 or 1)
