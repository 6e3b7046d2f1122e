// Runs before the first paint: marks that scripts run, and sets the light or dark that was chosen.
document.documentElement.classList.add("climbs");
try {
  document.documentElement.dataset.theme = localStorage.getItem("nanoladder.theme") ?? "";
} catch {} // storage may be forbidden
