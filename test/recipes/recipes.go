// Package recipes tests the files in etc with which a site brings Sluice to the software around it: module files, Open OnDemand,
// JupyterHub, Spack, EasyBuild and EESSI. What needs programs that are not part of a build has the tag recipes.
package recipes
