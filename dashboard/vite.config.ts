import tailwindcss from "@tailwindcss/vite";
import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

/**
 * `npm run dev` shows the coordinator that VITE_API_URL names, by default one on its usual port. The page asks the
 * development server, which asks the coordinator: that one answers pages of its own address only.
 */
const api = new URL(process.env["VITE_API_URL"] ?? "/api", "http://127.0.0.1:3000");

export default defineConfig(({ command }) => ({
  plugins: [react(), tailwindcss()],
  define: command === "serve" ? { "import.meta.env.VITE_API_URL": JSON.stringify("/api") } : {},
  build: {
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
    // What the first page loads is one file: apart, its small modules are compressed worse.
    rolldownOptions: { output: { advancedChunks: { groups: [{ name: "first", test: /node_modules\/(react|react-dom|scheduler)\/|removable|src\/(api|state|format|mode|search|session|colors)|src\/components\/(controls|states|values|Status|Card|Dialog|Page|Copy)|icons\/(activity|boxes|database)/ }] } } },
  },
  server: {
    proxy: {
      "/api": {
        target: api.origin,
        changeOrigin: true,
        rewrite: (path) => path.replace(/^\/api/, api.pathname.replace(/\/+$/, "")),
        configure: (proxy) => void proxy.on("proxyReq", (request) => request.removeHeader("origin")),
      },
    },
  },
  test: {
    include: ["src/**/*.test.{ts,tsx}"],
    testTimeout: 30_000,
    hookTimeout: 30_000,
  },
}));
