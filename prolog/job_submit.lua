-- Slurm's job_submit.lua with Sluice alone. A site that has its own adds the line of
-- dofile, and calls apply after its own changes to the job and modify likewise.
local sluice = dofile("/usr/lib/sluice/slurm/sluice.lua")

function slurm_job_submit(job, parts, uid)
  return sluice.apply(job, parts, uid)
end

function slurm_job_modify(job, record, parts, uid)
  return sluice.modify(job, record, parts, uid)
end

return slurm.SUCCESS
