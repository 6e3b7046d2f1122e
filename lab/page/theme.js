// Runs before the first paint: the page knows that it can be climbed, and in which light.
document.documentElement.classList.add("climbs");
try {
  document.documentElement.dataset.theme = localStorage.getItem("nanoladder.theme") ?? "";
} catch {} // storage may be forbidden
